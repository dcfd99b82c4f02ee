"""One decoding step through the layers of a rank: one new token for each active slot, without autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.model.attention import decode_attention
from nereus.model.kv_cache import KvCache
from nereus.model.layers import DecoderLayer
from nereus.model.rotary import rotate_


@dataclass(frozen=True)
class Step:
    """What all layers of one decoding step share.

    Attributes:
        rows: where the cache takes the new keys and values.
        mask: [n, L] additive attention mask over the cache.
    """

    cache: KvCache
    rows: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor


def decode_layer(layer: DecoderLayer, x: Tensor, step: Step) -> Tensor:
    """Run one layer on x [n, hidden], which is overwritten with the result."""
    attention = layer.attention
    heads, kv_heads = attention.heads, attention.kv_heads
    qkv = attention.qkv(layer.input_norm(x)).view(x.shape[0], -1, attention.head_dim)
    if attention.q_norm is not None and attention.k_norm is not None:
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
        qkv = torch.cat((attention.q_norm(q), attention.k_norm(k), v), dim=1)
    rotate_(qkv[:, : heads + kv_heads], step.cos, step.sin)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    step.cache.write(layer.index, step.rows, k, v)
    keys, values = step.cache.keys[layer.index], step.cache.values[layer.index]
    x += attention.o(decode_attention(q.contiguous(), keys, values, step.mask))
    x += layer.mlp(layer.post_norm(x))
    return x
