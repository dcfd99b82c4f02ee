"""KL estimators, token rewards and the controller against plain arithmetic."""

import math

import pytest
import torch

from nereus.ppo.kl import KlController, apply_no_eos_penalty, compute_kl, compute_token_rewards


def test_estimators_equal_their_formulas():
    logprobs = torch.tensor([-1.0, -2.5, -0.1], dtype=torch.float64)
    ref_logprobs = torch.tensor([-1.5, -2.0, -0.1], dtype=torch.float64)
    ratios = [math.exp(q - p) for p, q in zip(logprobs.tolist(), ref_logprobs.tolist(), strict=True)]
    assert compute_kl(logprobs, ref_logprobs).tolist() == pytest.approx([0.5, -0.5, 0.0])
    k3 = compute_kl(logprobs, ref_logprobs, "k3")
    assert k3.tolist() == pytest.approx([r - 1 - math.log(r) for r in ratios])
    assert (k3 >= 0).all()


def test_both_estimators_have_the_kl_as_mean():
    p = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
    q = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    exact = (p * (p / q).log()).sum().item()
    for kind in ("k1", "k3"):
        assert (p * compute_kl(p.log(), q.log(), kind)).sum().item() == pytest.approx(exact)


def test_token_rewards_put_the_score_on_the_last_response_token():
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -1.0, -1.0]])
    ref_logprobs = torch.tensor([[-2.0, -1.0, torch.nan], [-1.0, -2.0, -4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    rewards = compute_token_rewards(torch.tensor([5.0, -1.0]), logprobs, ref_logprobs, mask, kl_coef=0.1)
    expected = torch.tensor([[-0.1, 5.0 + 0.1, 0.0], [0.0, -0.1, -1.0 - 0.3]])
    torch.testing.assert_close(rewards, expected)


def test_no_eos_penalty_is_subtracted_from_cut_responses():
    scores = apply_no_eos_penalty(torch.tensor([1.0, 2.0]), torch.tensor([True, False]), 0.5)
    assert scores.tolist() == [1.0, 1.5]


def test_a_fixed_controller_stays():
    controller = KlController(0.05)
    assert controller.updated(100.0, 32) is controller


@pytest.mark.parametrize(("kl", "error"), [(6.6, 0.1), (60.0, 0.2), (5.7, -0.05), (0.0, -0.2)])
def test_the_adaptive_controller_follows_ziegler(kl, error):
    controller = KlController(0.05, adaptive=True, kl_target=6.0, kl_horizon=10_000)
    assert controller.updated(kl, 256).coef == pytest.approx(0.05 * (1 + error * 256 / 10_000), rel=1e-12)
    assert controller.coef == 0.05
