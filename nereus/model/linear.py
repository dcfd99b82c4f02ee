"""Matrix products with weights stored [out, in], on the fastest kernel that the machine has.

PyTorch's float32 products on CPU go to MKL, which misses its AVX512 path on AMD and runs at half the rate of oneDNN
there. oneDNN's product is reachable under private names only; they are used in this file and nowhere else, and
`F.linear` stands in where they are missing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def _onednn_pays() -> bool:
    """True where oneDNN beats PyTorch's float32 products: a rule, not a timing, so that runs stay bitwise equal."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "AuthenticAMD" in cpuinfo.read_text()[:4096]


def _fits(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.device.type == "cpu" and _onednn_pays() and x.numel() > 0


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias without autograd; x [N, in], weight [out, in], each contiguous or transposed."""
    if _fits(x):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t()) if need_x else None,
            product(grad.t(), x.t()) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias with gradients; x [N, in], weight [out, in], bias [out]."""
    if _fits(x) and torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]
    return product(x, weight, bias)
