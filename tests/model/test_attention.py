"""Packed and cached attention against a plain implementation, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nereus.model.attention import decode_attention, decode_mask, packed_attention
from nereus.model.batch import PackedBatch


def plain_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of one sequence [T, heads, D] from its definition."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[-1] ** 0.5
    for i in range(len(q)):
        for j in range(len(q)):
            if j > i or (window is not None and i - j >= window):
                scores[:, i, j] = float("-inf")
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def inputs(num_tokens: int, heads: int = 6, kv_heads: int = 2, head_dim: int = 8) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(num_tokens, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(9,), (5, 5, 5), (3, 9, 9, 1, 2)])
def test_packed_attention_forward_and_backward(lengths, window):
    q, k, v = inputs(sum(lengths))
    out = packed_attention(q, k, v, PackedBatch.of(lengths), window=window)
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([plain_attention(*part, window) for part in parts])
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    upstream = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [None, 3])
def test_decode_attention_sees_its_slot_up_to_its_position(window):
    positions = torch.tensor([4, 0, 6])
    torch.manual_seed(0)
    keys, values = torch.randn(2, 5, 2, 10, 8, dtype=torch.float64)
    q = torch.randn(3, 6, 8, dtype=torch.float64)
    mask = decode_mask(positions, 7, torch.float64, window)
    out = decode_attention(q, keys[:3, :, :7], values[:3, :, :7], mask).view(3, 6, 8)
    for slot, position in enumerate(positions.tolist()):
        k, v = (t[slot, :, : position + 1].transpose(0, 1) for t in (keys, values))
        padded = torch.zeros(position + 1, 6, 8, dtype=torch.float64)
        padded[-1] = q[slot]
        torch.testing.assert_close(out[slot], plain_attention(padded, k, v, window)[-1], atol=1e-12, rtol=0)


def test_many_bfloat16_slots_decode_like_few():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 5, 2, 10, 8).bfloat16()
    q = torch.randn(5, 6, 8).bfloat16()
    mask = decode_mask(torch.tensor([4, 0, 6, 9, 2]), 10, torch.bfloat16, 6)
    many = decode_attention(q, keys, values, mask)
    few = [decode_attention(q[i : i + 1], keys[i : i + 1], values[i : i + 1], mask[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(many, torch.cat(few), atol=0.03, rtol=0.03)
