"""Clipped losses against loops over Python floats, TRL's formulas written out, and numerical gradients."""

import math

import pytest
import torch

from nereus.ppo.losses import policy_loss, value_loss


def make_tokens(num, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num, generator=generator, dtype=dtype) for _ in range(3)]


def test_policy_loss_equals_a_loop():
    noise, old, advantages = make_tokens(50, 0)
    logprobs = old + 0.3 * noise
    result = policy_loss(logprobs, old, advantages, clip=0.2)
    losses, clipped, ratios = [], [], []
    for new, before, advantage in zip(logprobs.tolist(), old.tolist(), advantages.tolist(), strict=True):
        ratio = math.exp(new - before)
        near = min(max(ratio, 0.8), 1.2)
        losses.append(max(-advantage * ratio, -advantage * near))
        clipped.append(-advantage * near > -advantage * ratio)
        ratios.append(ratio)
    assert result.loss_sum.item() == pytest.approx(sum(losses), abs=1e-12)
    assert result.clipped.tolist() == clipped and any(clipped) and not all(clipped)
    assert result.ratio.tolist() == pytest.approx(ratios)


def test_value_loss_equals_a_loop():
    noise, old, returns = make_tokens(50, 1)
    values = old + noise
    result = value_loss(values, old, returns, value_clip=0.2)
    losses, clipped = [], []
    for new, before, target in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        near = min(max(new, before - 0.2), before + 0.2)
        losses.append(0.5 * max((new - target) ** 2, (near - target) ** 2))
        clipped.append((near - target) ** 2 > (new - target) ** 2)
    assert result.loss_sum.item() == pytest.approx(sum(losses), abs=1e-12)
    assert result.clipped.tolist() == clipped and any(clipped) and not all(clipped)


@pytest.mark.parametrize("value_clip", [None, math.inf])
def test_value_loss_without_clip_is_the_squared_error(value_clip):
    values, old, returns = make_tokens(9, 2)
    result = value_loss(values, old, returns, value_clip=value_clip)
    assert result.loss_sum.item() == pytest.approx(0.5 * ((values - returns) ** 2).sum().item())
    assert not result.clipped.any()


def test_losses_are_trls_means_times_the_tokens():
    noise, old, advantages = make_tokens(40, 3)
    new = old + 0.3 * noise
    ratio = torch.exp(new - old)
    trl_policy = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
    torch.testing.assert_close(policy_loss(new, old, advantages, clip=0.2).loss_sum / 40, trl_policy)
    clipped = torch.clamp(new, old - 0.2, old + 0.2)
    trl_value = 0.5 * torch.max((new - advantages) ** 2, (clipped - advantages) ** 2).mean()
    torch.testing.assert_close(value_loss(new, old, advantages, value_clip=0.2).loss_sum / 40, trl_value)


def test_gradients_equal_numerical_ones():
    noise, old, target = make_tokens(30, 4)
    moved = (old + 0.4 * noise).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, target, clip=0.2).loss_sum, (moved,))
    assert torch.autograd.gradcheck(lambda x: value_loss(x, old, target, value_clip=0.2).loss_sum, (moved,))


def test_the_first_update_has_the_policy_gradient():
    _, old, advantages = make_tokens(10, 5)
    logprobs = old.clone().requires_grad_()
    result = policy_loss(logprobs, old, advantages, clip=0.2)
    result.loss_sum.backward()
    torch.testing.assert_close(logprobs.grad, -advantages)
    assert (result.ratio == 1).all() and not result.clipped.any()


def test_parts_add_up_to_the_whole():
    noise, old, advantages = make_tokens(20, 6)
    whole = policy_loss(old + noise, old, advantages, clip=0.2).loss_sum
    cuts = [slice(0, 3), slice(3, 3), slice(3, 20)]
    parts = [policy_loss((old + noise)[cut], old[cut], advantages[cut], clip=0.2) for cut in cuts]
    assert sum(part.loss_sum.item() for part in parts) == pytest.approx(whole.item(), abs=1e-12)
    assert parts[1].ratio.numel() == 0


def test_bfloat16_is_lifted():
    tokens = make_tokens(4, 7, torch.bfloat16)
    assert policy_loss(*tokens, clip=0.2).loss_sum.dtype == torch.float32
    assert value_loss(*tokens, value_clip=0.2).loss_sum.dtype == torch.float32
