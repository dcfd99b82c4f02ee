"""Causal attention over packed sequences, and of one new token per slot over the KV cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nereus.model.batch import PackedBatch


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return [T, T] bool, True where a query may look: the last `window` positions, its own included."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch, *, window: int | None = None) -> Tensor:
    """Return causal attention inside each sequence, [N, heads, head_dim].

    Args:
        q: [N, heads, head_dim]; query heads of one KV head are neighbours.
        k, v: [N, kv_heads, head_dim].
        window: a token sees at most this many positions, its own included.
    """
    runs = batch.runs()
    sizes = [count * length for count, length in runs]
    parts = []
    for (count, length), *qkv in zip(runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        query, key, value = (t.view(count, length, t.shape[1], t.shape[2]).transpose(1, 2) for t in qkv)
        mask = _window_mask(length, window, q.device) if window is not None and window < length else None
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        parts.append(out.transpose(1, 2).reshape(count * length, q.shape[1], q.shape[2]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def decode_mask(positions: Tensor, num_positions: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return the additive mask [n, 1, 1, num_positions]: 0 where slot i may look (up to positions[i]), else -inf."""
    index = torch.arange(num_positions, device=positions.device)
    hidden = index > positions[:, None]
    if window is not None:
        hidden |= index <= positions[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, None]


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return attention of one query token per slot over the cache, [n, heads * head_dim].

    The query heads of a KV head stand where a sequence of queries usually does, so keys and values are read once for
    all of them and never copied.

    Args:
        q: [n, heads, head_dim].
        keys, values: [n, kv_heads, L, head_dim], views of the cache.
        mask: [n, 1, 1, L] additive, in the dtype of q.
    """
    n, heads, head_dim = q.shape
    kv_heads = keys.shape[1]
    query = q.reshape(n, kv_heads, heads // kv_heads, head_dim)
    if q.dtype == torch.bfloat16 and n > 2:
        return _decode_by_products(query, keys, values, mask)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    return out.view(n, heads * head_dim)


def _decode_by_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Two batched products, up to 1.7 times as fast as the fused kernel for many bfloat16 slots (AMD Zen 5)."""
    n, kv_heads, group, head_dim = query.shape
    # Keys on the left: bfloat16 kernels reorder a transposed right side, here the small one.
    scores = torch.bmm(key.flatten(0, 1), query.reshape(n * kv_heads, group, head_dim).transpose(1, 2))
    scores = scores.transpose(1, 2).unflatten(0, (n, kv_heads))
    weights = torch.softmax(torch.add(mask, scores, alpha=head_dim**-0.5), dim=-1)
    return torch.bmm(weights.flatten(0, 1), value.flatten(0, 1)).view(n, kv_heads * group * head_dim)
