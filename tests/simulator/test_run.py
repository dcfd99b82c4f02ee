"""Whole runs in small worlds: what policies do, and what becomes of them when devices or memory are gone."""

from collections.abc import Callable

import pytest

from nereus.simulator.compare import Comparison, simulate
from nereus.simulator.executor import true_seconds
from nereus.simulator.goals import NEEDED, describe_goals
from nereus.simulator.run import run_policy
from nereus.simulator.scenario import Scenario
from nereus.simulator.true_times import TrueTimes
from nereus.simulator.world import build_world

Small = Callable[..., Scenario]


@pytest.fixture(scope="module")
def drifting(small: Small) -> Comparison:
    """All policies while devices come and go and responses grow."""
    lengths = {"prompts_per_step": 512, "prompt_tokens": 128, "response_tokens": [[0, 500], [7, 4000]]}
    return simulate(small(devices=[[0, 2], [2, 4], [5, 3]], workload=lengths, steps=8))


def test_every_policy_survives_and_is_accounted_for(drifting: Comparison):
    for run in drifting.runs:
        record = run.to_record(drifting["oracle"])
        assert (record["steps"], record["oom_steps"]) == (8, 0)
        assert sum(run.step_seconds()) == pytest.approx(record["total_s"])
        assert record["transition_s"] == pytest.approx(record["transition_share"] * record["total_s"])
        # The pool shrinks at step 5: whoever used all four devices must have moved.
        assert len(set(record["plans"][-1]["plan"]["actor.generation"]["devices"]) - set(range(3))) == 0


def test_nobody_beats_the_oracle(drifting: Comparison):
    # Transitions of the policies are noisy, the oracle's are not: a hair of slack.
    assert all(run.regret(drifting["oracle"]) >= -0.005 for run in drifting.runs)  # type: ignore[operator]
    assert drifting["oracle"].regret(drifting["oracle"]) == 0


def test_gaps_are_to_the_best_plan_of_each_step(drifting: Comparison):
    assert all(gap >= -1e-9 for run in drifting.runs for gap in run.gaps)
    assert drifting["payback"].gaps[1] < 0.1


def test_decisions_are_recorded_with_what_was_measured(drifting: Comparison):
    decisions = drifting["payback"].decisions
    assert decisions[-1]["step"] <= 7
    assert all(decision["reason"].endswith(".") for decision in decisions)
    assert any("latency_s" in decision.get("measured", {}) for decision in decisions)
    assert {decision["verdict"] for decision in decisions} <= {"admit", "refuse", "urgent", "keep"}


def test_fixed_never_changes_tp_or_pp(drifting: Comparison):
    assert drifting["fixed"].to_record()["layout_transitions"] == 0


def test_runs_are_reproducible(small: Small):
    world = build_world(small(steps=2))
    assert run_policy(world, "payback").to_record() == run_policy(world, "payback").to_record()


def test_noise_is_equal_for_all_policies_and_changes_with_the_seed(small: Small):
    world, other = build_world(small()), build_world(small(truth={"seed": 1}))
    assert world.noise(3, 0, "weight_sync") == world.noise(3, 0, "weight_sync")
    assert len({world.noise(3, 0, "a"), world.noise(4, 0, "a"), world.noise(3, 1, "a"), other.noise(3, 0, "a")}) == 4


def test_a_loss_without_notice_costs_the_attempt_and_the_step_is_done_again(small: Small):
    world = build_world(small(devices=[[0, 8], [2, 4, "lost"]], steps=4))
    run = run_policy(world, "payback")
    kinds = [(entry.step, entry.kind) for entry in run.spent]
    assert kinds == [(0, "step"), (1, "step"), (2, "lost"), (2, "transition"), (2, "step"), (3, "step")]
    assert run.steps == 4
    assert max(run.spent[-1].plan.devices) < 4
    assert run.spent[2].seconds > 15
    assert [d["step"] for d in run.decisions if d["verdict"] == "urgent"] == [2]


def test_with_notice_nothing_is_broken_off(small: Small):
    run = run_policy(build_world(small(devices=[[0, 8], [2, 4]], steps=4)), "payback")
    assert [entry.kind for entry in run.spent] == ["step", "step", "transition", "step", "step"]


def test_a_pause_without_devices_goes_on_from_staged_state(small: Small):
    world = build_world(small(devices=[[0, 4], [1, 0], [2, 4]], steps=3))
    run = run_policy(world, "payback")
    assert run.steps == 3
    urgent = next(decision for decision in run.decisions if decision["verdict"] == "urgent")
    assert (urgent["step"], urgent["transition_s"]["direct"]) == (1, None)


def test_devices_that_never_come_back_end_the_run(small: Small):
    run = run_policy(build_world(small(devices=[[0, 4], [2, 0]], steps=4)), "payback")
    assert run.steps == 2
    assert run.ended_by is not None and "0 devices at step 2" in run.ended_by


def test_memory_that_runs_out_is_counted_and_learned_from(small: Small):
    tight = {"preset": "a100-64gb-hdr", "devices": 2}
    lengths = {"prompts_per_step": 2048, "prompt_tokens": 128, "response_tokens": 3000}
    world = build_world(small(cluster=tight, workload=lengths, truth={"memory_factor": 1.4}, steps=3))
    record = run_policy(world, "payback").to_record()
    assert (record["steps"], record["oom_steps"]) == (3, 1)


def test_a_straggler_is_left_out_when_the_rest_is_faster(small: Small):
    load = {"prompts_per_step": 2048, "prompt_tokens": 128, "response_tokens": 1000}
    cluster = {"preset": "a100-64gb-hdr", "devices": 3}
    world = build_world(small(cluster=cluster, workload=load, truth={"slow": [[1, 2, 4.0]]}, steps=6))
    run = run_policy(world, "payback")
    assert 2 in run.spent[0].plan.devices
    assert 2 not in run.spent[-1].plan.devices


def test_slow_says_the_same_as_a_factor_or_as_a_share(small: Small):
    twice, half = (build_world(small(truth={"slow": [[1, 3, f], [3, "storage", f]]})) for f in (2.0, 0.5))
    assert twice.efficiencies(1).device_factor == half.efficiencies(1).device_factor == {3: 2.0}
    assert twice.efficiencies(0).device_factor == {}
    for world in (twice, half):
        nominal = world.cluster.kind.storage.bandwidth_bytes_s
        assert world.true_cluster(2).kind.storage.bandwidth_bytes_s == nominal
        assert world.true_cluster(3).kind.storage.bandwidth_bytes_s == nominal / 2


def test_responses_at_the_cap_are_warned_of(small: Small):
    load = {"prompts_per_step": 64, "prompt_tokens": 128, "response_tokens": [[0, 100], [2, 900]]}
    world = build_world(small(workload={**load, "max_response_tokens": 800}, steps=4))
    run = run_policy(world, "payback")
    assert [step for step, _ in run.warnings] == [2, 3]
    assert world.load(3).response_tokens == 800


def test_the_oracle_needs_no_other_policy(small: Small):
    comparison = simulate(small(steps=3), ["oracle"])
    assert comparison["oracle"].steps == 3
    plan, total = comparison.best_static or (None, 0)
    assert plan is not None
    assert total >= 0.995 * comparison["oracle"].seconds()


def test_times_of_many_plans_are_those_of_each(drifting: Comparison):
    world, plans = drifting.world, drifting.landscape.plans
    for step in (0, 3):
        for plan, seconds in zip(plans, TrueTimes(world).of(step, plans), strict=True):
            assert seconds == pytest.approx(true_seconds(world, step, plan))


def test_goals_are_told_with_what_comes_out(drifting: Comparison):
    lines = describe_goals(dict.fromkeys(NEEDED, drifting)).splitlines()[2:]
    rows = {
        what: (goal, result, met)
        for what, goal, result, met in ([c.strip() for c in line.split("|")[1:-1]] for line in lines)
    }
    share = drifting["payback"].to_record()["transition_share"]
    assert f"all {share:.3%}" in rows["long-run-1024: share of layout transitions"][1]
    assert rows["all 7 scenarios: payback's steps that ran out of memory"] == ("0", "0", "yes")
    assert rows["stuck-at-cap: warned of as a training problem"] == ("warned", "never", "NO")
    assert rows["three traces: payback's regret to the oracle"][2] == "yes"
