"""Generalised advantage estimation, and the whitening of a step's advantages."""

from __future__ import annotations

import torch
from torch import Tensor

WHITENING_EPS = 1e-8


def compute_gae(
    token_rewards: Tensor, values: Tensor, response_mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages and value targets, computed in at least float32.

    Shapes: all inputs and both outputs are [B, T]; positions outside `response_mask` (bool) are 0 in both
    outputs, and whatever the inputs hold there is ignored. The value after the last response token is 0.
    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16; the targets are advantages + values.

    Raises:
        ValueError: the three shapes differ.
    """
    if not token_rewards.shape == values.shape == response_mask.shape:
        raise ValueError(
            f"token_rewards, values and response_mask must have one shape [B, T], not {list(token_rewards.shape)}, "
            f"{list(values.shape)} and {list(response_mask.shape)}."
        )
    dtype = torch.promote_types(torch.promote_types(token_rewards.dtype, values.dtype), torch.float32)
    mask = response_mask.bool()
    # masked_fill, not a product: padding may hold NaN, and 0 * NaN is NaN.
    rewards = token_rewards.to(dtype).masked_fill(~mask, 0.0)
    values = values.to(dtype).masked_fill(~mask, 0.0)
    advantages = torch.zeros_like(values)
    num_samples, num_tokens = values.shape
    next_value = values.new_zeros(num_samples)
    next_advantage = values.new_zeros(num_samples)
    for t in reversed(range(num_tokens)):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * lam * next_advantage).masked_fill(~mask[:, t], 0.0)
        next_value = values[:, t]
        advantages[:, t] = next_advantage
    return advantages, advantages + values


def whiten_advantages(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Return advantages of mean 0 and variance 1 over all response tokens of the step.

    The variance is the biased one (divided by the number of tokens) and 1e-8 is added to it under the root, so
    a step whose advantages are all equal gives zeros.

    Shapes: both inputs and the output are [B, T]; the output is 0 outside `response_mask` (bool). Computed in at
    least float32.
    """
    mask = response_mask.bool()
    dtype = torch.promote_types(advantages.dtype, torch.float32)
    advantages = advantages.to(dtype).masked_fill(~mask, 0.0)
    num_tokens = mask.sum().clamp(min=1)
    centred = (advantages - advantages.sum() / num_tokens).masked_fill(~mask, 0.0)
    variance = centred.square().sum() / num_tokens
    return centred * torch.rsqrt(variance + WHITENING_EPS)
