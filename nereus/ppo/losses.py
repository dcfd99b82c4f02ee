"""The clipped losses of actor and critic, as sums over packed response tokens.

Nothing here divides by a token count: a gradient is a sum until the minibatch's global count divides it once, so
it can't depend on how tokens are spread over micro-batches and replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """The actor's loss over N tokens, with what the metrics need.

    Attributes:
        loss_sum: scalar, differentiable, the sum over tokens.
        ratio: [N], new over old probability of each token; detached.
        clipped: [N] bool, where the clipped branch is the larger loss.
    """

    loss_sum: Tensor
    ratio: Tensor
    clipped: Tensor


@dataclass(frozen=True)
class ValueLoss:
    """The critic's loss over N tokens.

    Attributes:
        loss_sum: scalar, differentiable, the sum over tokens of 0.5 * max of the two squared errors.
        clipped: [N] bool, where the clipped value has the larger error.
    """

    loss_sum: Tensor
    clipped: Tensor


def policy_loss(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip: float) -> PolicyLoss:
    """Return the clipped surrogate loss, summed over tokens, in at least float32.

    The loss of a token is max(-A r, -A clamp(r, 1 - clip, 1 + clip)) with r = exp(logprob - old_logprob).
    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.

    Shapes: the inputs are [N], one entry a response token of the packed micro-batch. Gradients flow to `logprobs`
    only.
    """
    assert logprobs.shape == old_logprobs.shape == advantages.shape, "one entry a token in each"
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    advantages = advantages.detach().to(dtype)
    ratio = torch.exp(logprobs.to(dtype) - old_logprobs.detach().to(dtype))
    plain = -advantages * ratio
    clamped = -advantages * ratio.clamp(1.0 - clip, 1.0 + clip)
    return PolicyLoss(torch.maximum(plain, clamped).sum(), ratio.detach(), (clamped > plain).detach())


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, value_clip: float | None) -> ValueLoss:
    """Return the clipped value loss, summed over tokens, in at least float32.

    The loss of a token is 0.5 * max((v - R)^2, (clamp(v, v_old - value_clip, v_old + value_clip) - R)^2).

    Shapes: the inputs are [N], one entry a response token. Gradients flow to `values` only. `value_clip` None or
    infinite leaves 0.5 * (v - R)^2.
    """
    assert values.shape == old_values.shape == returns.shape, "one entry a token in each"
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, returns = values.to(dtype), returns.detach().to(dtype)
    plain = (values - returns).square()
    if value_clip is None or math.isinf(value_clip):
        return ValueLoss(0.5 * plain.sum(), torch.zeros_like(plain, dtype=torch.bool))
    old_values = old_values.detach().to(dtype)
    near = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    clamped = (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(plain, clamped).sum(), (clamped > plain).detach())
