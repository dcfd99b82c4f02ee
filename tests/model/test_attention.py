"""Packed and cached attention against a plain implementation, sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nereus.model import attention
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


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotate [T, heads, D] plane by plane, from the definition, with frequencies 1 / (i + 1)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] / torch.arange(1.0, half + 1, dtype=x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), dim=-1
    )


def angles_of(positions: Tensor, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = positions[:, None, None] / torch.arange(1.0, half + 1, dtype=dtype)
    return angles.cos().repeat(1, 1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [(9,), (5, 5, 5), (3, 9, 9, 1, 2)])
def test_packed_attention_forward_and_backward(monkeypatch, lengths, window, plain):
    if plain:  # the form of other devices
        monkeypatch.setattr(attention, "hasattr", lambda *_: False, raising=False)
    torch.manual_seed(0)
    leaf = torch.randn(sum(lengths), 10, 8, dtype=torch.float64, requires_grad=True)
    batch = PackedBatch.of(lengths)
    cos, sin = angles_of(batch.positions, 4, torch.float64)
    out = packed_attention(leaf * 1.0, 6, cos, sin, batch, window=window)

    def expected_of(part: Tensor) -> Tensor:
        q, k, v = part.split((6, 2, 2), dim=1)
        positions = torch.arange(len(part))
        return plain_attention(rotated(q, positions), rotated(k, positions), v, window)

    expected = torch.cat([expected_of(part) for part in leaf.split(lengths)])
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    upstream = torch.randn_like(out)
    (mine,) = torch.autograd.grad(out, leaf, upstream)
    (theirs,) = torch.autograd.grad(expected, leaf, upstream)
    torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_bfloat16_attention_is_as_exact_as_its_input_and_output():
    torch.manual_seed(0)
    leaf = torch.randn(24, 10, 8).bfloat16().requires_grad_()
    batch = PackedBatch.of((20, 4))
    cos, sin = angles_of(batch.positions, 4, torch.float32)
    exact = leaf.detach().double().requires_grad_()
    out = packed_attention(leaf * 1.0, 6, cos, sin, batch)
    expected = packed_attention(exact * 1.0, 6, cos.double(), sin.double(), batch)
    torch.testing.assert_close(out.double(), expected, atol=0.02, rtol=0.02)
    upstream = torch.randn_like(out)
    (mine,) = torch.autograd.grad(out, leaf, upstream)
    (theirs,) = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(mine.double(), theirs, atol=0.05, rtol=0.05)


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
