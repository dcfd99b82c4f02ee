"""Metrics against plain arithmetic; digests against the bytes they are defined over."""

import statistics
import struct

import pytest
import torch
import xxhash

from nereus.ppo import metrics


def test_rewards():
    scores = [0.5, 1.0, -2.0, 4.0]
    result = metrics.compute_reward_metrics(torch.tensor(scores))
    assert result == pytest.approx({"reward_mean": statistics.fmean(scores), "reward_std": statistics.pstdev(scores)})


def test_responses():
    result = metrics.compute_response_metrics(list(range(1, 101)), 96)
    expected = {
        "response_tokens_mean": 50.5,
        "response_tokens_p95": 95.0,
        "share_at_cap": 0.05,
        "rollout_tokens": 5050,
    }
    assert result == pytest.approx(expected)


def test_kl_is_a_mean_over_tokens_not_over_responses():
    logprobs = torch.tensor([[0.0, -9.0, -9.0], [-1.0, -1.0, -1.0]])
    ref_logprobs = torch.tensor([[-4.0, 0.0, 0.0], [-1.0, -1.0, -1.0]])
    mask = torch.tensor([[True, False, False], [True, True, True]])
    result = metrics.compute_kl_metrics(logprobs, ref_logprobs, mask)
    assert result["kl_k1"] == pytest.approx(1.0)
    assert result["kl_k3"] == pytest.approx((torch.tensor(-4.0).exp().item() - 1 + 4) / 4)


def test_gap_and_mean_look_inside_the_mask_only():
    left, right = torch.tensor([[1.0, 2.0, 7.0]]), torch.tensor([[1.5, 1.75, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert metrics.masked_max_gap(left, right, mask) == 0.5
    assert metrics.masked_mean(left, mask) == 1.5
    assert metrics.masked_mean(left, torch.zeros_like(mask)) == 0.0


def test_explained_variance():
    returns = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    mask = torch.tensor([[True, True, True, False]])
    assert metrics.compute_explained_variance(returns, returns, mask) == 1.0
    assert metrics.compute_explained_variance(torch.full((1, 4), 2.0), returns, mask) == pytest.approx(0.0)
    assert metrics.compute_explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert metrics.compute_explained_variance(returns, torch.ones(1, 4), mask) == 0.0


def test_digests_are_over_little_endian_numbers_in_id_order():
    assert metrics.digest_sample_ids([7, 3]) == xxhash.xxh3_128_hexdigest(struct.pack("<2q", 3, 7))
    expected = xxhash.xxh3_128_hexdigest(struct.pack("<8q", 3, 3, 5, 6, 7, 7, 1, 9))
    assert metrics.digest_rollouts([7, 3], [[9], torch.tensor([5, 6, 7], dtype=torch.int32)]) == expected


def test_the_digest_sees_where_a_response_ends():
    assert metrics.digest_rollouts([1, 2], [[3], [4, 5]]) != metrics.digest_rollouts([1, 2], [[3, 4], [5]])
