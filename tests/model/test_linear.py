"""The fast product against the plain one, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from nereus.model import linear as module
from nereus.model.linear import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_matches_the_plain_product(dtype, rows, with_bias):
    torch.manual_seed(0)
    x = torch.randn(rows, 48, dtype=dtype, requires_grad=True)
    weight = torch.randn(96, 48, dtype=dtype, requires_grad=True)
    bias = torch.randn(96, dtype=dtype, requires_grad=True) if with_bias else None
    leaves = [x, weight] + ([bias] if bias is not None else [])
    upstream = torch.randn(rows, 96, dtype=dtype)
    out = linear(x, weight, bias)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.linear(*exact)
    bound = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]
    assert (out - expected).abs().max() < bound
    grads = torch.autograd.grad(out, leaves, upstream)
    for grad, reference in zip(grads, torch.autograd.grad(expected, exact, upstream.double()), strict=True):
        assert grad.dtype == dtype
        assert (grad - reference).abs().max() < bound


def test_plain_products_stand_in_where_onednn_does_not_pay(monkeypatch):
    x, weight = torch.randn(5, 48), torch.randn(96, 48)
    fast = linear(x, weight)
    monkeypatch.setattr(module, "_onednn_pays", lambda: False)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    torch.testing.assert_close(fast, F.linear(x, weight), atol=1e-4, rtol=0)
