"""The KL penalty: its estimators, the token rewards that hold it, and the controller of its coefficient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def compute_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k3"] = "k1") -> Tensor:
    """Return the estimate of KL(policy || reference) at every token, in at least float32.

    k1 = log p - log q is unbiased and may be negative; k3 = q/p - 1 - log(q/p) is unbiased and never negative.
    Source: J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html.

    Shapes: both inputs (log-probs of the drawn tokens, in nats) and the output are equal.
    """
    dtype = torch.promote_types(torch.promote_types(logprobs.dtype, ref_logprobs.dtype), torch.float32)
    k1 = logprobs.to(dtype) - ref_logprobs.to(dtype)
    if kind == "k1":
        return k1
    assert kind == "k3", kind
    return torch.expm1(-k1) + k1


def compute_token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, *, kl_coef: float
) -> Tensor:
    """Return the reward of every token: the KL penalty everywhere, the score on the last response token.

    Source: Ziegler et al. 2019, arXiv:1909.08593, eq. 2.

    Args:
        scores: [B], one a response.
        logprobs: [B, T], log-probs under the policy that made the rollouts.
        ref_logprobs: [B, T], log-probs under the frozen reference.
        response_mask: [B, T] bool; every row has at least one response token.
        kl_coef: weight of the k1 estimate, subtracted on every response token.

    Returns:
        [B, T], at least float32, 0 outside the mask.
    """
    mask = response_mask.bool()
    assert bool(mask.any(dim=1).all()), "a response without tokens has no place for its score"
    kl = compute_kl(logprobs, ref_logprobs).masked_fill(~mask, 0.0)
    dtype = torch.promote_types(scores.dtype, kl.dtype)
    positions = torch.arange(mask.shape[1], device=mask.device)
    last = torch.where(mask, positions, -1).amax(dim=1)
    rewards = -kl_coef * kl.to(dtype)
    rewards[torch.arange(mask.shape[0], device=mask.device), last] += scores.to(dtype)
    return rewards


def apply_no_eos_penalty(scores: Tensor, has_eos: Tensor, penalty: float) -> Tensor:
    """Return scores [B] with `penalty` subtracted from responses without EOS (`has_eos` is [B] bool)."""
    return scores - penalty * (~has_eos.bool()).to(scores.dtype)


@dataclass(frozen=True)
class KlController:
    """The coefficient of the KL penalty, fixed or steered towards a target.

    The adaptive rule is a proportional controller in log space whose error is clipped to 0.2:
    coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * num_samples / horizon.
    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    Attributes:
        coef: weight of k1 in the token rewards.
        adaptive: whether `updated` changes `coef`.
        kl_target: aim for the mean over samples of k1 summed over the response, in nats.
        kl_horizon: samples after which a full error has changed `coef` by about a fifth.
    """

    coef: float
    adaptive: bool = False
    kl_target: float = 6.0
    kl_horizon: int = 10_000

    def updated(self, mean_sample_kl: float, num_samples: int) -> KlController:
        """Return the controller after a step of `num_samples` responses with that mean summed k1 in nats."""
        if not self.adaptive:
            return self
        error = min(max(mean_sample_kl / self.kl_target - 1.0, -0.2), 0.2)
        return dataclasses.replace(self, coef=self.coef * (1.0 + error * num_samples / self.kl_horizon))
