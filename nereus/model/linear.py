"""Matrix products with weights stored [out, in], on the fastest kernel that the machine has.

PyTorch's float32 products on CPU go to MKL, which misses its AVX512 path on AMD and runs at half the rate of oneDNN
there. oneDNN's product is reachable under private names only; they are used in this file and nowhere else, and
`F.linear` stands in where they are missing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

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


class Product(Protocol):
    """x @ weight.T + bias for x [N, in] with few rows, without autograd, and with what decoding does next to it."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def silu(self, x: Tensor) -> Tensor:
        """Return silu of the product."""

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product plus `other` [N, out]."""

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the product times `other` [N, out], element by element."""


class _PlainProduct:
    """Shares the weight; every step is an operation of its own."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self(x), inplace=True)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).add_(other)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x).mul_(other)


class _PackedProduct:
    """Holds a copy of the weight in oneDNN's blocked order and lets its kernel do the next step on the way out."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        return self._unary(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def silu(self, x: Tensor) -> Tensor:
        return self._unary(x, self.weight, self.bias, "swish", [], "")  # type: ignore[no-any-return]

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self.weight, self.bias, "add")  # type: ignore[no-any-return]

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self._binary(x, other, self.weight, self.bias, "mul")  # type: ignore[no-any-return]


def packing_pays(weight: Tensor) -> bool:
    """True where products with few rows are faster on packed weights: by a rule, so that runs stay bitwise equal.

    Measured at 1, 8 and 32 rows of SmolLM2's shapes on AMD Zen 5: 1 to 2 times in float32, 1.3 to 3 in bfloat16.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def make_product(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Product:
    """Return the product with weight [out, in]; `packed` copies the weight where that pays, else it is shared."""
    return _PackedProduct(weight, bias) if packed and packing_pays(weight) else _PlainProduct(weight, bias)
