"""Layers of the decoder with their sharding: norm, embedding, attention block, MLP block.

Matrices are fused by rows in memory (q, k, v; gate, up). A rank holds whole KV groups, single rows of the MLP and
single rows of the vocabulary, as `nereus.layout` cuts them. Gradient rules: weights of q_norm and k_norm see only the
rank's own heads, so their gradients are summed over tp; other norms and row-parallel biases get the same gradient on
all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nereus.layout import partition
from nereus.model.attention import packed_attention
from nereus.model.batch import PackedBatch
from nereus.model.group import Group
from nereus.model.kv_cache import KvCache
from nereus.model.linear import gradient_sink, linear
from nereus.model.parallel import enter_parallel, leave_parallel
from nereus.model.rotary import lifted
from nereus.model.spec import ModelSpec


@dataclass(frozen=True)
class Place:
    """Where a rank's parameters are and how they reduce: what every layer's constructor needs."""

    tp_rank: int
    tp: int
    group: Group
    dtype: torch.dtype
    device: torch.device | str

    def empty(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))

    def share(self, num_units: int) -> int:
        """Return how many of `num_units` this rank holds."""
        start, stop = partition(num_units, self.tp)[self.tp_rank]
        return stop - start


@dataclass(frozen=True)
class Pass:
    """What all layers of one forward share: the batch, its rotary angles and, in prefill, where K and V go."""

    batch: PackedBatch
    cos: Tensor
    sin: Tensor
    cache: KvCache | None = None
    cache_rows: Tensor | None = None


class _RmsNorm(torch.autograd.Function):
    """y = x * scale * weight with scale = (mean x^2 + eps)^-1/2, a row's mean over its n elements.

    Gradient: with t = grad * x, d weight = sum of t * scale over rows, and
    d x = grad * weight * scale - x * scale^3 * (t . weight) / n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        high = x.to(lifted(x.dtype))
        scale = torch.rsqrt(high.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        normed = high * scale
        return normed.mul_(weight) if normed.dtype == x.dtype else normed.to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        size = x.shape[-1]
        high, grad_high, weight_high = (t.to(scale.dtype) for t in (x, grad, weight))
        t = (grad_high * high).reshape(-1, size)
        slope = torch.mv(t, weight_high).view(scale.shape) * scale.pow(3) / size
        grad_x = (grad_high * weight_high).mul_(scale).addcmul_(high, slope, value=-1)
        grad_weight = torch.mv(t.t(), scale.view(-1)) if ctx.needs_input_grad[1] else None
        return grad_x.to(x.dtype), None if grad_weight is None else grad_weight.to(weight.dtype), None


class RmsNorm(nn.Module):
    """Root mean square norm over the last dimension, in at least float32; held whole by every tp rank."""

    def __init__(self, size: int, eps: float, place: Place) -> None:
        super().__init__()
        self.weight = place.empty(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-any-return]


class Linear(nn.Module):
    """A matrix of this rank, [out, in] with an optional bias [out]; whether it is a part is its owner's matter."""

    def __init__(self, rows: int, columns: int, bias: bool, place: Place) -> None:
        super().__init__()
        self.weight = place.empty(rows, columns)
        self.bias = place.empty(rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RowParallel(Linear):
    """A matrix cut by columns: partial products are summed over the ranks, then the whole bias is added once."""

    def __init__(self, rows: int, columns: int, bias: bool, place: Place) -> None:
        super().__init__(rows, columns, bias, place)
        self.group = place.group

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return linear(x, self.weight, self.bias)
        y = leave_parallel(linear(x, self.weight), self.group)
        return y if self.bias is None else y + self.bias


class _Embedding(torch.autograd.Function):
    """Rows of a matrix; the gradient of a repeated row is summed in at least float32, in the order of the batch."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight  # the parameter itself, for its sink
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
        (ids,) = ctx.saved_tensors
        weight, sink = ctx.weight, gradient_sink(ctx.weight)
        rows, places = torch.unique(ids, return_inverse=True)
        sums = grad.new_zeros((len(rows), grad.shape[1]), dtype=lifted(grad.dtype))
        sums.index_add_(0, places, grad.to(sums.dtype))
        if sink is None:
            return None, torch.zeros_like(weight).index_copy_(0, rows, sums.to(weight.dtype))
        sink.index_add_(0, rows, sums.to(sink.dtype))
        return None, None


class VocabEmbedding(nn.Module):
    """Token embedding cut by rows of the vocabulary: each rank looks up its own tokens, then ranks are summed."""

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        super().__init__()
        self.start, self.stop = partition(spec.vocab, place.tp)[place.tp_rank]
        self.weight = place.empty(self.stop - self.start, spec.hidden)
        self.group = place.group

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return _Embedding.apply(ids, self.weight)  # type: ignore[no-any-return]
        local = ids - self.start
        foreign = (local < 0) | (local >= self.stop - self.start)
        rows = _Embedding.apply(local.masked_fill(foreign, 0), self.weight)
        return leave_parallel(rows.masked_fill(foreign[:, None], 0.0), self.group)


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of a fused [N, 2 * width] tensor; saves only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        grad_gate, grad_up = result.chunk(2, dim=-1)
        buffer = F.silu(gate)
        torch.mul(grad, buffer, out=grad_up)
        torch.mul(grad, up, out=buffer)
        torch.ops.aten.silu_backward.grad_input(buffer, gate, grad_input=grad_gate)
        return result


class Attention(nn.Module):
    """Grouped-query attention; a rank holds whole KV groups (3 KV heads on tp 2: 2 + 1)."""

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        super().__init__()
        self.kv_heads = place.share(spec.kv_heads)
        self.heads = self.kv_heads * spec.group_size
        self.head_dim = spec.head_dim
        self.window = spec.sliding_window
        self.group = place.group
        rows = (self.heads + 2 * self.kv_heads) * spec.head_dim
        self.qkv = Linear(rows, spec.hidden, spec.qkv_bias, place)
        self.o = RowParallel(spec.hidden, self.heads * spec.head_dim, spec.o_bias, place)
        self.q_norm = RmsNorm(spec.head_dim, spec.rms_eps, place) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, spec.rms_eps, place) if spec.qk_norm else None

    def forward(self, x: Tensor, index: int, run: Pass) -> Tensor:
        qkv = self.qkv(enter_parallel(x, self.group)).view(x.shape[0], -1, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)
        out = packed_attention(qkv, self.heads, run.cos, run.sin, run.batch, window=self.window)
        if run.cache is not None and run.cache_rows is not None:  # without autograd: the keys are rotated by now
            run.cache.write(index, run.cache_rows, qkv[:, self.heads :])
        return self.o(out.view(x.shape[0], -1))


class Mlp(nn.Module):
    """SwiGLU MLP; a rank holds the same rows of gate and up, and those columns of down."""

    def __init__(self, spec: ModelSpec, place: Place) -> None:
        super().__init__()
        width = place.share(spec.intermediate)
        self.group = place.group
        self.gate_up = Linear(2 * width, spec.hidden, spec.mlp_bias, place)
        self.down = RowParallel(spec.hidden, width, spec.mlp_bias, place)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_SwiGlu.apply(self.gate_up(enter_parallel(x, self.group))))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP blocks with residual connections."""

    def __init__(self, spec: ModelSpec, index: int, place: Place) -> None:
        super().__init__()
        self.index = index  # among the layers of this rank
        self.input_norm = RmsNorm(spec.hidden, spec.rms_eps, place)
        self.attention = Attention(spec, place)
        self.post_norm = RmsNorm(spec.hidden, spec.rms_eps, place)
        self.mlp = Mlp(spec, place)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        x = x + self.attention(self.input_norm(x), self.index, run)
        return x + self.mlp(self.post_norm(x))
