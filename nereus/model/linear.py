"""Matrix products with weights stored [out, in], on the fastest kernel that the machine has.

PyTorch's float32 products on CPU go to MKL, which runs AMD at the width of AVX2. oneDNN uses AVX512 there: twice the
rate on Zen 5, 5 to 10% more on Zen 4 (whose AVX512 is half as wide). It is reachable under private names only; they
are used in this file and nowhere else, and `F.linear` and `torch.mm` stand in where they are missing. What is used is
a rule on the processor and the sizes, never a timing, so that runs stay bitwise equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nereus.limits import GRADIENT_BLOCK_ELEMENTS as _BLOCK_ELEMENTS

# Below this many multiplications a float32 product is done before oneDNN's set-up (13 us a call) has paid off.
_LEAST_MULTIPLICATIONS = 1 << 23
# oneDNN makes and keeps a kernel of half a MiB for each number of rows. A weight smaller than that (in float32) has to
# meet the same number of rows several times until it has paid off.
_LEAST_WEIGHT_ELEMENTS = 1 << 17
# Float32 matrices with fewer elements stream from the cache, where packing them gains nothing.
_LEAST_PACKED_ELEMENTS = 1 << 18
_ZEN5_FAMILY = 26
# Without instructions for bfloat16 oneDNN sums a whole product in a float32 buffer beside it: rows are done in blocks
# whose sums are at most this large. (1024 x 512 @ 512 x 32768: 68 instead of 192 MiB, in the same time.)
_LIFTED_SUM_BYTES = 8 << 20
_BFLOAT16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class _Processor:
    vendor: str
    family: int
    has_avx512: bool
    has_bfloat16: bool


@cache
def _processor() -> _Processor:
    """Return what /proc/cpuinfo says of the first processor; nothing where there is none."""
    path = Path("/proc/cpuinfo")
    first = path.read_text().split("\n\n")[0] if path.exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    family = fields.get("cpu family", "")
    flags = {*fields.get("flags", "").split(), *fields.get("Features", "").split()}
    return _Processor(
        fields.get("vendor_id", ""),
        int(family) if family.isdigit() else 0,
        "avx512f" in flags,
        not flags.isdisjoint(_BFLOAT16_FLAGS),
    )


def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@cache
def _onednn_pays() -> bool:
    """True where oneDNN's float32 products of dense operands beat MKL's."""
    return _has_onednn() and _processor().vendor == "AuthenticAMD" and _processor().has_avx512


@cache
def _onednn_pays_transposed() -> bool:
    """True where that is so for weight gradients too, although oneDNN first copies their transposed left operand."""
    return _onednn_pays() and _processor().family >= _ZEN5_FAMILY


def _is_large(x: Tensor, weight: Tensor) -> bool:
    is_float32 = x.dtype == torch.float32 and x.device.type == "cpu"
    num_elements = weight.numel()
    pays_a_kernel = num_elements >= _LEAST_WEIGHT_ELEMENTS and x.shape[0] * num_elements >= _LEAST_MULTIPLICATIONS
    return is_float32 and pays_a_kernel


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias without autograd; x [N, in], weight [out, in], each contiguous or transposed."""
    if _is_large(x, weight) and _onednn_pays():
        return _onednn_product(x, weight, bias)
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and not _processor().has_bfloat16:
        return _product_by_rows(x, weight, bias, max(1, _LIFTED_SUM_BYTES // (4 * weight.shape[0])))
    return F.linear(x, weight, bias)


def _onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]


def _product_by_rows(x: Tensor, weight: Tensor, bias: Tensor | None, step: int) -> Tensor:
    """Return x @ weight.T + bias, `step` rows at a time."""
    if x.shape[0] <= step:
        return F.linear(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        if bias is None:
            torch.mm(x[rows], weight.t(), out=out[rows])
        else:
            torch.addmm(bias, x[rows], weight.t(), out=out[rows])
    return out


def gradient_sink(weight: Tensor) -> Tensor | None:
    """Return the buffer that gradients of a weight are added to at once, instead of travelling through autograd.

    That is its attribute `main_grad` (a trainer's, of any float dtype), else its `grad`, if there is one already. The
    result is what autograd would have left there, without a temporary of the weight's size.
    """
    sink = getattr(weight, "main_grad", None)
    return weight.grad if sink is None and weight.is_leaf else sink


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    """Return grad.T @ x [out, in] for grad [N, out], x [N, in], or None when the sink of `weight` has taken it."""
    sink = gradient_sink(weight)
    with_onednn = _is_large(x, weight) and _onednn_pays_transposed()
    if sink is not None and sink.dtype == x.dtype and not with_onednn:
        sink.addmm_(grad.t(), x)
        return None
    if sink is None:
        return _transposed_product(grad, x, with_onednn)
    step = max(1, _BLOCK_ELEMENTS // x.shape[1])
    for start in range(0, grad.shape[1], step):
        rows = slice(start, start + step)
        sink[rows].add_(_transposed_product(grad[:, rows], x, with_onednn))
    return None


def _transposed_product(grad: Tensor, x: Tensor, with_onednn: bool) -> Tensor:
    return _onednn_product(grad.t(), x.t()) if with_onednn else torch.mm(grad.t(), x)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter itself, for its sink
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (x,) = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        grad = grad.contiguous()
        return (
            product(grad, ctx.weight.detach().t()) if need_x else None,
            weight_gradient(grad, x, ctx.weight) if need_weight else None,
            grad.sum(0) if need_bias else None,
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias with gradients; x [N, in], weight [out, in], bias [out]."""
    if torch.is_grad_enabled():
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
    """True where products with few rows are faster on packed weights.

    Measured at 1, 8 and 32 rows of SmolLM2's shapes on AMD Zen 4: up to 2 times in float32, 1.3 to 3 in bfloat16.
    """
    if weight.device.type != "cpu" or not (_has_onednn() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    is_large = weight.numel() >= _LEAST_PACKED_ELEMENTS
    return weight.dtype == torch.bfloat16 or (weight.dtype == torch.float32 and is_large)


def make_product(weight: Tensor, bias: Tensor | None, *, packed: bool) -> Product:
    """Return the product with weight [out, in]; `packed` copies the weight where that pays, else it is shared."""
    return _PackedProduct(weight, bias) if packed and packing_pays(weight) else _PlainProduct(weight, bias)
