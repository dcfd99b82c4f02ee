"""GAE and whitening against plain loops over Python floats, and against TRL's formulas written out."""

import math

import pytest
import torch

from nereus.ppo.advantages import compute_gae, whiten_advantages


def make_batch(lengths, width, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(len(lengths), width, generator=generator, dtype=dtype)
    values = torch.randn(len(lengths), width, generator=generator, dtype=dtype)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return rewards, values, mask


def plain_gae(rewards, values, gamma, lam):
    """Sum of (gamma lam)^k delta_{t+k}, by the definition, for one response."""
    num = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < num else 0.0) - values[t] for t in range(num)]
    return [sum((gamma * lam) ** k * deltas[t + k] for k in range(num - t)) for t in range(num)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.97, 0.0)])
def test_gae_equals_the_definition_response_by_response(gamma, lam):
    lengths = [5, 1, 7, 3]
    rewards, values, mask = make_batch(lengths, 7)
    advantages, returns = compute_gae(rewards, values, mask, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        expected = plain_gae(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
        assert advantages[row, :length].tolist() == pytest.approx(expected, abs=1e-12)
        targets = [a + v for a, v in zip(expected, values[row, :length].tolist(), strict=True)]
        assert returns[row, :length].tolist() == pytest.approx(targets, abs=1e-12)
        assert advantages[row, length:].eq(0).all() and returns[row, length:].eq(0).all()


def test_gae_ignores_what_stands_outside_the_mask():
    rewards, values, mask = make_batch([2, 4], 4)
    expected = compute_gae(rewards, values, mask, gamma=1.0, lam=0.95)
    rewards[0, 2:], values[0, 2:] = torch.nan, torch.inf
    for left, right in zip(compute_gae(rewards, values, mask, gamma=1.0, lam=0.95), expected, strict=True):
        assert torch.equal(left, right)


def test_gae_is_lifted_to_float32_and_float64_is_kept():
    for dtype, lifted in [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]:
        rewards, values, mask = make_batch([3], 3, dtype=torch.float64)
        advantages, returns = compute_gae(rewards.to(dtype), values.to(dtype), mask, gamma=1.0, lam=0.95)
        assert advantages.dtype == returns.dtype == lifted


def test_gae_refuses_unequal_shapes():
    rewards, values, mask = make_batch([3], 3)
    with pytest.raises(ValueError, match="one shape"):
        compute_gae(rewards, values[:, :2], mask, gamma=1.0, lam=0.95)


def test_whitening_equals_loops_over_all_tokens_of_the_step():
    advantages, _, mask = make_batch([4, 1, 6], 6, seed=1)
    inside = advantages[mask].tolist()
    mean = sum(inside) / len(inside)
    variance = sum((a - mean) ** 2 for a in inside) / len(inside)
    expected = [(a - mean) / math.sqrt(variance + 1e-8) for a in inside]
    whitened = whiten_advantages(advantages, mask)
    assert whitened[mask].tolist() == pytest.approx(expected, abs=1e-12)
    assert whitened[~mask].eq(0).all()
    assert whitened[mask].mean().item() == pytest.approx(0.0, abs=1e-12)


def test_whitening_is_trls_masked_whiten_up_to_bessels_correction():
    values, _, mask = make_batch([4, 2, 6], 6, seed=2)
    num = mask.sum()
    mean = (values * mask).sum() / num
    variance = ((values - mean) ** 2 * mask).sum() / num
    trl = (values - mean) * torch.rsqrt(variance * num / (num - 1) + 1e-8)
    scale = torch.sqrt(num / (num - 1))
    torch.testing.assert_close(whiten_advantages(values, mask)[mask], trl[mask] * scale, rtol=1e-7, atol=1e-9)


def test_whitening_equal_advantages_gives_zeros():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert whiten_advantages(torch.full((2, 3), 3.5), mask).eq(0).all()
