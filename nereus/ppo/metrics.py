"""The fields of a line of metrics.jsonl that come from a step's tensors; names are the fields' names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from nereus.ppo.kl import compute_kl


def compute_reward_metrics(scores: Tensor) -> dict[str, float]:
    """Return mean and biased standard deviation of the scores [B], before any penalty."""
    scores = scores.double()
    return {"reward_mean": scores.mean().item(), "reward_std": scores.std(correction=0).item()}


def compute_response_metrics(lengths: Sequence[int], max_response_tokens: int) -> dict[str, float]:
    """Return mean and p95 of the response lengths in tokens, the share that reached the cap, and their sum.

    p95 is by nearest rank: the smallest length that at least 95% of the responses don't exceed.
    """
    array = np.asarray(lengths, dtype=np.int64)
    return {
        "response_tokens_mean": float(array.mean()),
        "response_tokens_p95": float(np.quantile(array, 0.95, method="inverted_cdf")),
        "share_at_cap": float((array >= max_response_tokens).mean()),
        "rollout_tokens": int(array.sum()),
    }


def compute_kl_metrics(logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor) -> dict[str, float]:
    """Return both KL estimates in nats, as means over response tokens; all inputs are [B, T]."""
    return {
        "kl_k1": masked_mean(compute_kl(logprobs, ref_logprobs, "k1"), response_mask),
        "kl_k3": masked_mean(compute_kl(logprobs, ref_logprobs, "k3"), response_mask),
    }


def masked_mean(values: Tensor, response_mask: Tensor) -> float:
    """Return the mean in float64 of the values inside the mask; 0 without any."""
    inside = values[response_mask.bool()].double()
    return inside.mean().item() if inside.numel() else 0.0


def masked_max_gap(left: Tensor, right: Tensor, response_mask: Tensor) -> float:
    """Return the largest |left - right| inside the mask (`generation_logprob_gap_max`); NaN if there is one."""
    mask = response_mask.bool()
    gaps = (left[mask].double() - right[mask].double()).abs()
    return gaps.max().item() if gaps.numel() else 0.0


def compute_explained_variance(values: Tensor, returns: Tensor, response_mask: Tensor) -> float:
    """Return 1 - var(returns - values) / var(returns) over response tokens; 0 where the returns don't vary.

    Shapes: all inputs are [B, T]. 1 is a perfect critic, 0 one that knows only the mean.
    """
    mask = response_mask.bool()
    returns, values = returns[mask].double(), values[mask].double()
    variance = returns.var(correction=0)
    if not returns.numel() or variance == 0:
        return 0.0
    return 1.0 - ((returns - values).var(correction=0) / variance).item()


def digest_sample_ids(sample_ids: Sequence[int]) -> str:
    """Return xxh3_128, in hex, of the ids in ascending order as little-endian int64."""
    return xxhash.xxh3_128_hexdigest(np.sort(np.asarray(sample_ids, dtype="<i8")).tobytes())


def digest_rollouts(sample_ids: Sequence[int], tokens: Sequence[Sequence[int] | Tensor]) -> str:
    """Return xxh3_128, in hex, over (id, number of tokens, tokens) of every response, in ascending id order.

    All numbers are little-endian int64, so the digest depends on neither padding nor the tokens' dtype.
    """
    assert len(sample_ids) == len(tokens), (len(sample_ids), len(tokens))
    hasher = xxhash.xxh3_128()
    for index in sorted(range(len(sample_ids)), key=lambda i: sample_ids[i]):
        row = np.asarray(torch.as_tensor(tokens[index]).cpu(), dtype="<i8")
        hasher.update(np.array([sample_ids[index], len(row)], dtype="<i8").tobytes())
        hasher.update(row.tobytes())
    return hasher.hexdigest()
