"""Training alarms: each is raised by its cause, told in a sentence, and by nothing that a healthy run does."""

import json
import random
from collections.abc import Iterable

import pytest

from nereus.alarms import REPEAT_STEPS, Alarms

MIB = 1 << 20
PLAN = {"actor.training": {"dp": 2, "tp": 1, "pp": 1, "devices": [0, 1], "micro_batch": 4, "recompute": False}}
MOVED = {"actor.training": PLAN["actor.training"] | {"dp": 1, "devices": [0]}}


def line(step: int, **changes) -> dict:
    """Return a healthy line; its numbers wobble as those of a run do."""
    wobble = random.Random(step)
    return {
        "step": step, "reward_mean": 0.1 + 0.02 * step + wobble.uniform(-0.02, 0.02), "reward_std": 0.1,
        "kl_k1": 0.02 * step * wobble.uniform(0.8, 1.2), "share_at_cap": 0.2, "rollout_tokens": 1000,
        "response_tokens_p95": 60.0, "generation_logprob_gap_max": 6e-7, "plan": PLAN,
        "peak_memory_bytes": {"0": (100 + wobble.randint(-5, 5)) * MIB, "1": (100 + wobble.randint(-5, 5)) * MIB},
    } | changes  # fmt: skip


def look(lines: Iterable[dict], precision: str = "float32") -> list[tuple[int, str]]:
    """Return every warning with its step; the state goes through JSON between two steps, as staged state does."""
    told, alarms = [], Alarms(cap_tokens=64, precision=precision)
    for one in lines:
        told += [(one["step"], text) for text in alarms.look(one)]
        alarms = Alarms.from_record(json.loads(json.dumps(alarms.to_record())), cap_tokens=64, precision=precision)
    return told


def test_a_healthy_run_gives_no_alarm():
    assert look(line(step) for step in range(60)) == []


def test_responses_at_the_cap_are_told_again_now_and_then():
    told = look(line(step, share_at_cap=0.9 if step >= 3 else 0.2) for step in range(30))
    assert [step for step, _ in told] == [3, 3 + REPEAT_STEPS, 3 + 2 * REPEAT_STEPS]
    assert told[0][1].startswith("90% of the responses end at the cap of 64 tokens")


@pytest.mark.parametrize(("kl", "says"), [(0.9, "jumped to 0.900 nats a token from 0.050"), (2.5, "is 2.50"),
                                          (float("nan"), "is no number"), (None, "is no number")])  # fmt: skip
def test_a_blow_up_of_the_kl(kl: float | None, says: str):
    told = look(line(step, kl_k1=kl if step == 8 else 0.05) for step in range(12))
    assert [step for step, _ in told] == [8] and says in told[0][1] and "ppo.kl_coef" in told[0][1]


def test_a_kl_that_grows_as_the_policy_learns_is_no_blow_up():
    assert look(line(step, kl_k1=0.01 * step**1.5) for step in range(30)) == []


def test_a_reward_that_collapses():
    rewards = [0.1 + 0.05 * step for step in range(16)] + [0.2] * 6
    told = look(line(step, reward_mean=reward) for step, reward in enumerate(rewards))
    assert len(told) == 1 and 17 <= told[0][0] <= 19
    assert "fell to" in told[0][1] and "from 0.775 at step 15" in told[0][1]


def test_a_reward_that_sways_within_its_spread_has_not_collapsed():
    assert look(line(step, reward_mean=0.5 + 0.3 * (-1) ** (step // 5), reward_std=0.7) for step in range(40)) == []


@pytest.mark.parametrize(("precision", "usual", "gap"), [("float64", 1e-12, 2e-9), ("float32", 5e-7, 2e-3),
                                                         ("bfloat16", 0.05, 0.4), ("float32", 5e-7, None)])  # fmt: skip
def test_a_gap_between_sampler_and_trainer(precision: str, usual: float, gap: float | None):
    def lines(**at_the_gap) -> list[dict]:
        gaps = [usual * (1 + step % 2) if step != 7 else gap for step in range(10)]
        return [line(s, generation_logprob_gap_max=g, **(at_the_gap if s >= 7 else {})) for s, g in enumerate(gaps)]

    told = look(lines(), precision)
    assert [step for step, _ in told] == [7] and "log-probs" in told[0][1] and "weight sync" in told[0][1]
    # Right after a change of the plan it is the transition that answers for the weights.
    assert look(lines(plan=MOVED), precision) == []


def test_a_wrong_gap_is_not_what_later_ones_are_held_against():
    told = look((line(s, generation_logprob_gap_max=0.05 if s < 7 else 0.3) for s in range(20)), "bfloat16")
    assert [step for step, _ in told] == [7, 7 + REPEAT_STEPS]


def leaking(step: int, **changes) -> dict:
    peaks = line(step)["peak_memory_bytes"]
    return line(step, peak_memory_bytes={"0": peaks["0"], "1": peaks["1"] + 4 * MIB * step}, **changes)


def test_memory_that_stays_behind():
    told = look(leaking(step) for step in range(20))
    assert told and told[0][0] >= 8 and "Device 1 peaks at" in told[0][1] and "left behind" in told[0][1]


def test_memory_that_grows_with_the_work_or_with_another_plan_is_no_alarm():
    assert look(leaking(step, rollout_tokens=1000 + 50 * step) for step in range(20)) == []
    other = {"actor.training": PLAN["actor.training"] | {"micro_batch": 8}}
    assert look(leaking(step, plan=(PLAN, other)[step // 6 % 2]) for step in range(24)) == []
    full = {"peak_memory_bytes": {"0": 150 * MIB}}  # for the last three steps on one plan, and the first on another
    assert look(line(s, plan=other if s == 11 else PLAN, **(full if s >= 8 else {})) for s in range(12)) == []


def test_what_is_remembered_stays_small():
    alarms = Alarms(cap_tokens=64, precision="float32")
    for step in range(500):
        alarms.look(line(step, kl_k1=0.02, reward_mean=0.001 * step))
    assert len(json.dumps(alarms.to_record())) < 16_000


def test_a_run_that_was_set_back_looks_at_its_steps_anew():
    alarms = Alarms(cap_tokens=64, precision="float32")
    at_cap = [line(step, share_at_cap=0.9 if step >= 5 else 0.2) for step in range(8)]
    assert [bool(alarms.look(one)) for one in at_cap] == [False] * 5 + [True] + [False] * 2
    assert [bool(alarms.look(one)) for one in at_cap[4:]] == [False, True, False, False]
