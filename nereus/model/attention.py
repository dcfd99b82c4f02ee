"""Causal attention over packed sequences, and of one new token per slot over the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nereus.model.batch import PackedBatch
from nereus.model.rotary import rotate, rotate_


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Return [T, T] bool, True where a query may look: the last `window` positions, its own included."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


def _by_sequence(qkv: Tensor, heads: int, lengths: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield views of each sequence's q [kv_heads, group, T, D] and k, v [kv_heads, 1, T, D]."""
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=1)
    query = q.unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3)
    key, value = (t.transpose(0, 1)[:, None] for t in (k, v))
    return zip(*(t.split(lengths, dim=2) for t in (query, key, value)), strict=True)


class _PackedAttention(torch.autograd.Function):
    """Rotation, in place, and causal attention of a fused [N, heads + 2 * kv_heads, D] tensor, one call a sequence.

    Keeps the rotated input, the output and the log-sum-exp. The kernel is the one behind
    `F.scaled_dot_product_attention`; it is called by its own name because its gradient in bfloat16 takes 2.5 times as
    long as in float32 (sequences of 96 tokens, AMD Zen 4), so lifting happens here, without lifted copies being kept,
    and because it reads keys that a group shares through a stride of 0, without copies for each head.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, lengths: tuple[int, ...], window: int | None
    ) -> Tensor:
        kv_heads = (qkv.shape[1] - heads) // 2
        rotate_(qkv[:, : heads + kv_heads], cos, sin)
        out = qkv.new_empty(qkv.shape[0], heads, qkv.shape[2])
        places = out.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).split(lengths, dim=2)
        sums = []
        for (q, k, v), place in zip(_by_sequence(qkv.to(cos.dtype), heads, lengths), places, strict=True):
            mask = _mask_of(q, window)
            attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k.expand_as(q), v.expand_as(q), 0.0, mask is None, attn_mask=mask
            )
            place.copy_(attended)
            sums.append(log_sum)
        ctx.save_for_backward(qkv, out, cos, sin, *sums)
        ctx.rest = heads, lengths, window
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, cos, sin, *sums = ctx.saved_tensors
        heads, lengths, window = ctx.rest
        kv_heads = (qkv.shape[1] - heads) // 2
        outs, grads = (
            t.to(cos.dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).split(lengths, dim=2) for t in (out, grad)
        )
        grad_qkv = torch.empty_like(qkv)
        places = _by_sequence(grad_qkv, heads, lengths)
        inputs = _by_sequence(qkv.to(cos.dtype), heads, lengths)
        for (q, k, v), y, dy, log_sum, (q_place, k_place, v_place) in zip(
            inputs, outs, grads, sums, places, strict=True
        ):
            mask = _mask_of(q, window)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                dy, q, k.expand_as(q), v.expand_as(q), y, log_sum, 0.0, mask is None, attn_mask=mask
            )
            q_place.copy_(dq)
            k_place.copy_(dk.sum(1, keepdim=True))
            v_place.copy_(dv.sum(1, keepdim=True))
        rotate_(grad_qkv[:, : heads + kv_heads], cos, -sin)
        return grad_qkv, None, None, None, None, None


def _mask_of(q: Tensor, window: int | None) -> Tensor | None:
    length = q.shape[2]
    if window is None or window >= length:
        return None
    allowed = _window_mask(length, window, q.device)
    return torch.zeros(allowed.shape, dtype=q.dtype).masked_fill_(~allowed, float("-inf"))


def packed_attention(
    qkv: Tensor, heads: int, cos: Tensor, sin: Tensor, batch: PackedBatch, *, window: int | None = None
) -> Tensor:
    """Return causal attention with rotary positions inside each sequence, [N, heads, head_dim].

    Args:
        qkv: [N, heads + 2 * kv_heads, head_dim]: queries, keys, values; query heads of one KV head are neighbours.
            Without autograd, and on a CPU always, queries and keys are rotated in place: what made `qkv` must not need
            its result for its gradient.
        cos, sin: [N, 1, head_dim] of the tokens' positions, as `rotate_` takes them.
        window: a token sees at most this many positions, its own included.

    On a CPU bfloat16 is lifted to float32.
    """
    if qkv.device.type == "cpu" and hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward"):
        return _PackedAttention.apply(qkv, heads, cos, sin, batch.lengths, window)  # type: ignore[no-any-return]
    qkv = rotate(qkv, (heads + qkv.shape[1]) // 2, cos, sin)
    return _attend_by_sequence(qkv, heads, batch, window)


def _attend_by_sequence(qkv: Tensor, heads: int, batch: PackedBatch, window: int | None) -> Tensor:
    """The plain form, for other devices."""
    kv_heads = (qkv.shape[1] - heads) // 2
    parts = []
    for part in qkv.split(batch.lengths):
        q, k, v = (t.transpose(0, 1)[None] for t in part.split((heads, kv_heads, kv_heads), dim=1))
        length = part.shape[0]
        mask = _window_mask(length, window, q.device) if window is not None and window < length else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != kv_heads
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


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
