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
    """Return the additive mask [n, num_positions]: 0 where slot i may look (up to positions[i]), else -inf."""
    index = torch.arange(num_positions, device=positions.device)
    hidden = index > positions[:, None]
    if window is not None:
        hidden |= index <= positions[:, None] - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return mask.masked_fill_(hidden, float("-inf"))


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return attention of one query token per slot over the cache, [n, heads * head_dim].

    Args:
        q: [n, heads, head_dim].
        keys, values: [slots, kv_heads, max_len, head_dim], the whole cache of a layer; read as views.
        mask: [n, L] additive; positions from L on are not read.
    """
    n, heads, head_dim = q.shape
    kv_heads, length = keys.shape[1], mask.shape[1]
    query = q.view(n * kv_heads, heads // kv_heads, head_dim)
    key = keys.flatten(0, 1)[: n * kv_heads, :length]
    value = values.flatten(0, 1)[: n * kv_heads, :length]
    scores = torch.bmm(query, key.transpose(1, 2)).view(n, heads, length)
    weights = torch.softmax(scores * head_dim**-0.5 + mask[:, None], dim=-1, dtype=mask.dtype).to(q.dtype)
    return torch.bmm(weights.view(n * kv_heads, heads // kv_heads, length), value).view(n, heads * head_dim)
