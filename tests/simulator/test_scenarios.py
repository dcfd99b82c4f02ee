"""What the shipped scenarios must show. All but the first take minutes and run under `make slow`."""

import os
from functools import cache
from statistics import mean

import pytest

from nereus.simulator.compare import Comparison, simulate
from nereus.simulator.load import load_scenario
from nereus.simulator.run import run_policy
from nereus.simulator.world import build_world

PAPER_TRACES = ("paper-trace-1", "paper-trace-2", "paper-trace-3")
public_traces = pytest.mark.skipif("NEREUS_TRACES" not in os.environ, reason="needs the public traces")
minutes = pytest.mark.timeout(3600)


@cache
def compare(name: str) -> Comparison:
    return simulate(load_scenario(name))


def test_stuck_at_cap_is_told_as_a_training_problem():
    world = build_world(load_scenario("stuck-at-cap", ["model.preset=smollm2-135m", "cluster.devices=4", "steps=16"]))
    run = run_policy(world, "fixed")
    assert run.steps == 16
    assert [step for step, _ in run.warnings] == [12, 13, 14, 15]
    assert "training problem" in run.warnings[0][1]


@pytest.mark.slow
@minutes
@pytest.mark.parametrize(
    "name", ["monotone-growth", "flapping", "slow-link", "straggler", "stuck-at-cap", "length-drop"]
)
def test_payback_survives_without_running_out_of_memory_near_the_oracle(name: str):
    comparison = compare(name)
    payback = comparison["payback"]
    record = payback.to_record(comparison["oracle"])
    assert record["steps"] == comparison.world.scenario.steps
    assert record["oom_steps"] == 0
    assert record["regret_to_oracle"] < 0.10


@pytest.mark.slow
@minutes
def test_monotone_growth_beats_every_static_plan():
    comparison = compare("monotone-growth")
    static = comparison.best_static
    assert static is None or comparison["payback"].seconds() < static[1]


@pytest.mark.slow
@minutes
def test_flapping_is_within_two_percent_of_the_best_static_plan():
    comparison = compare("flapping")
    static = comparison.best_static
    assert static is not None
    assert comparison["payback"].seconds() < 1.02 * static[1]


@pytest.mark.slow
@minutes
@public_traces
def test_the_paper_traces():
    comparisons = [compare(name) for name in PAPER_TRACES]

    def mean_step_s(policy: str) -> float:
        return mean(c[policy].seconds() / c[policy].steps for c in comparisons)

    assert all(c["payback"].steps == 26 and c["payback"].to_record()["oom_steps"] == 0 for c in comparisons)
    assert mean(c["payback"].regret(c["oracle"]) or 0.0 for c in comparisons) <= 0.05
    assert mean_step_s("payback") < mean_step_s("every_k")
    assert mean_step_s("payback") < 1.005 * mean_step_s("any_gain")


@pytest.mark.slow
@minutes
def test_a_long_run_spends_next_to_nothing_on_layout_transitions():
    run = run_policy(build_world(load_scenario("long-run-1024")), "payback")
    record = run.to_record()
    assert (record["steps"], record["oom_steps"]) == (1000, 0)
    assert record["layout_transition_s"] / record["total_s"] <= 0.00079
