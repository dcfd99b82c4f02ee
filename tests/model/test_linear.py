"""The fast product against the plain one, forward and backward."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from nereus.model import linear as module
from nereus.model.linear import linear, make_product


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


def test_large_products_take_the_same_path_forward_and_backward():
    torch.manual_seed(0)
    x, weight = torch.randn(300, 256, requires_grad=True), torch.randn(512, 256, requires_grad=True)
    upstream = torch.randn(300, 512)
    out = linear(x, weight)
    torch.testing.assert_close(out, F.linear(x.double(), weight.double()).float(), atol=1e-4, rtol=1e-5)
    grad_x, grad_weight = torch.autograd.grad(out, (x, weight), upstream)
    torch.testing.assert_close(grad_x, (upstream.double() @ weight.double()).float(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(grad_weight, (upstream.double().t() @ x.double()).float(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("pays", [False, True])
def test_plain_products_stand_in_where_onednn_does_not_pay(monkeypatch, pays):
    torch.manual_seed(0)
    monkeypatch.setattr(module, "_onednn_pays", lambda: pays and module._has_onednn())
    monkeypatch.setattr(module, "_onednn_pays_transposed", lambda: pays and module._has_onednn())
    x, weight = torch.randn(300, 256), torch.randn(512, 256)
    weight.requires_grad_()
    out = linear(x, weight)
    torch.testing.assert_close(out, F.linear(x, weight), atol=1e-4, rtol=1e-5)
    (grad,) = torch.autograd.grad(out.sum(), weight)
    torch.testing.assert_close(grad, x.sum(0).expand_as(grad), atol=1e-3, rtol=1e-5)


class _HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def _bytes_in_use(heap: _HeapInfo) -> int:
    return heap.uordblks + heap.hblkhd


def test_products_with_a_small_weight_leave_nothing_behind_for_each_number_of_rows(monkeypatch):
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        pytest.skip("the heap of this system tells no sizes")
    mallinfo.restype = _HeapInfo
    monkeypatch.setattr(module, "_onednn_pays", module._has_onednn)
    weight = torch.randn(512, 128)
    module.product(torch.randn(200, 128), weight)
    before = _bytes_in_use(mallinfo())
    for rows in range(201, 241):
        module.product(torch.randn(rows, 128), weight)
    assert _bytes_in_use(mallinfo()) - before < 2 << 20  # half a MiB each where oneDNN does them


@pytest.mark.parametrize("with_bias", [False, True])
def test_processors_without_bfloat16_do_its_products_by_rows(monkeypatch, with_bias):
    torch.manual_seed(0)
    x, weight = torch.randn(20, 48).bfloat16(), torch.randn(96, 48).bfloat16()
    bias = torch.randn(96).bfloat16() if with_bias else None
    monkeypatch.setattr(module, "_processor", lambda: module._Processor("GenuineIntel", 6, True, False))
    blocks = []
    monkeypatch.setattr(module, "_LIFTED_SUM_BYTES", 7 * 96 * 4)
    by_rows = module._product_by_rows
    monkeypatch.setattr(module, "_product_by_rows", lambda *all: blocks.append(all[3]) or by_rows(*all))
    for rows, columns in ((x, weight), (x.t().contiguous().t(), weight.t().contiguous().t())):
        torch.testing.assert_close(module.product(rows, columns, bias), F.linear(x, weight, bias))
    assert blocks == [7, 7]


@pytest.mark.parametrize("block", [1 << 22, 7 * 48])
@pytest.mark.parametrize("onednn", [False, True])
def test_gradients_are_added_to_a_buffer_that_is_there(monkeypatch, block, onednn):
    monkeypatch.setattr(module, "_BLOCK_ELEMENTS", block)
    monkeypatch.setattr(module, "_LEAST_MULTIPLICATIONS", 1)
    monkeypatch.setattr(module, "_LEAST_WEIGHT_ELEMENTS", 1)
    monkeypatch.setattr(module, "_onednn_pays_transposed", lambda: onednn and module._has_onednn())
    torch.manual_seed(0)
    x, weight = torch.randn(9, 48), torch.nn.Parameter(torch.randn(96, 48))
    (expected,) = torch.autograd.grad(linear(x, weight).square().sum(), weight)
    buffer = torch.ones_like(weight)
    weight.grad = buffer
    linear(x, weight).square().sum().backward()
    assert weight.grad is buffer
    torch.testing.assert_close(buffer, expected + 1)


def test_main_grad_takes_bfloat16_gradients_in_float32():
    torch.manual_seed(0)
    x, weight = torch.randn(9, 48).bfloat16(), torch.nn.Parameter(torch.randn(96, 48).bfloat16())
    weight.main_grad = torch.ones(96, 48)
    linear(x, weight).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad, 1 + x.float().sum(0).expand(96, 48), atol=0.05, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_prepared_products_do_what_decoding_needs(monkeypatch, dtype, with_bias):
    monkeypatch.setattr(module, "_LEAST_PACKED_ELEMENTS", 1)
    torch.manual_seed(0)
    x, weight, other = (torch.randn(*shape).to(dtype) for shape in ((5, 48), (96, 48), (5, 96)))
    bias = torch.randn(96).to(dtype) if with_bias else None
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for packed in (False, True):
        product = make_product(weight, bias, packed=packed)
        results = [product(x), product.silu(x), product.plus(x, other), product.times(x, other)]
        exact = [expected, F.silu(expected), expected + other.double(), expected * other.double()]
        for result, reference in zip(results, exact, strict=True):
            bound = {"atol": 1e-4, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.15, "rtol": 0.02}
            torch.testing.assert_close(result.double(), reference, **bound)
