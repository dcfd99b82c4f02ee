"""One decoding step through the layers of a rank: one new token for each active slot, without autograd.

A step has few rows, so what counts is how weights stream from memory and how many operations a layer needs: weights
are packed for the kernel beforehand, silu, the product with it and the residual sum are part of a matrix product, and
rotary angles, mask and cache rows are made once for all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.model.attention import decode_attention
from nereus.model.kv_cache import KvCache
from nereus.model.layers import DecoderLayer, RmsNorm, RowParallel
from nereus.model.linear import Product, make_product
from nereus.model.rotary import lifted, rotate_


@dataclass(frozen=True)
class Step:
    """What all layers of one decoding step share.

    Attributes:
        rows: where the cache takes the new keys and values.
        cos, sin: [n, 1, head_dim], as `rotate_` takes them.
        mask: [n, 1, 1, L] additive attention mask over the cache.
        windows: per layer views of the keys and values that the mask covers.
    """

    cache: KvCache
    windows: list[tuple[Tensor, Tensor]]
    rows: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor


class DecodeLayer:
    """A layer of the shard with its matrices as decoding wants them; `packed` copies them, else they are shared."""

    def __init__(self, layer: DecoderLayer, *, packed: bool) -> None:
        self.layer = layer
        attention, mlp = layer.attention, layer.mlp
        self.input_norm, self.post_norm = _DecodeNorm(layer.input_norm), _DecodeNorm(layer.post_norm)
        self.q_norm = None if attention.q_norm is None else _DecodeNorm(attention.q_norm)
        self.k_norm = None if attention.k_norm is None else _DecodeNorm(attention.k_norm)
        self.qkv = make_product(attention.qkv.weight, attention.qkv.bias, packed=packed)
        self.o = _row_parallel_product(attention.o, packed)
        gate, up = mlp.gate_up.weight.chunk(2)
        gate_bias, up_bias = (None, None) if mlp.gate_up.bias is None else mlp.gate_up.bias.chunk(2)
        self.gate = make_product(gate, gate_bias, packed=packed)
        self.up = make_product(up, up_bias, packed=packed)
        self.down = _row_parallel_product(mlp.down, packed)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Return the layer's output for x [n, hidden]."""
        layer = self.layer
        x = self._add(self.o, layer.attention.o, self._attend(self.input_norm(x), step), x)
        h = self.post_norm(x)
        return self._add(self.down, layer.mlp.down, self.up.times(h, self.gate.silu(h)), x)

    def _attend(self, x: Tensor, step: Step) -> Tensor:
        attention, index = self.layer.attention, self.layer.index
        heads, both = attention.heads, attention.heads + attention.kv_heads
        qkv = self.qkv(x).view(x.shape[0], -1, attention.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            qkv[:, :heads] = self.q_norm(qkv[:, :heads])
            qkv[:, heads:both] = self.k_norm(qkv[:, heads:both])
        rotate_(qkv[:, :both], step.cos, step.sin)
        step.cache.write(index, step.rows, qkv[:, heads:])
        return decode_attention(qkv[:, :heads], *step.windows[index], step.mask)

    @staticmethod
    def _add(product: Product, matrix: RowParallel, x: Tensor, residual: Tensor) -> Tensor:
        if matrix.group.size == 1:
            return product.plus(x, residual)
        y = product(x)
        matrix.group.all_reduce(y)
        y += residual
        return y if matrix.bias is None else y.add_(matrix.bias)


def _row_parallel_product(matrix: RowParallel, packed: bool) -> Product:
    """The bias of a matrix that ranks share is added after the sum over ranks."""
    return make_product(matrix.weight, matrix.bias if matrix.group.size == 1 else None, packed=packed)


class _DecodeNorm:
    """The root mean square norm in four operations: x / hypot(|x|, sqrt(n eps)) * (weight sqrt(n)), lifted."""

    def __init__(self, norm: RmsNorm) -> None:
        size = norm.weight.shape[0]
        self.weight = norm.weight.detach().to(lifted(norm.weight.dtype)) * math.sqrt(size)
        self.floor = self.weight.new_tensor(math.sqrt(size * norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=self.weight.dtype)
        y = torch.div(x, length.hypot_(self.floor)).mul_(self.weight)
        return y if y.dtype == x.dtype else y.to(x.dtype)
