"""What the shipped scenarios must show. All but the first take minutes and run under `make slow`."""

import os
from functools import cache
from statistics import mean

import pytest

from nereus.simulator.compare import Comparison, simulate
from nereus.simulator.goals import PAPER_TRACES
from nereus.simulator.load import load_scenario
from nereus.simulator.result import saving
from nereus.simulator.run import run_policy
from nereus.simulator.world import build_world

public_traces = pytest.mark.skipif("NEREUS_TRACES" not in os.environ, reason="needs the public traces")
GAMMAS = (0.0, 0.1, 0.4, 0.5, 0.65, 1.0)
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
    # A tie but for the noise; see the simulator's README.
    assert mean_step_s("payback") < 1.005 * mean_step_s("any_gain")


@pytest.mark.slow
@minutes
@public_traces
def test_the_first_trace_is_faster_than_fixed_by_most_of_what_the_oracle_saves():
    comparison = compare(PAPER_TRACES[0])
    saved, most = (saving(comparison[name], comparison["fixed"]) for name in ("payback", "oracle"))
    # Published are 27.7%; here even the oracle is below that, and the simulator's README says why.
    assert 0.10 < saved < most < 0.277


@pytest.mark.slow
@minutes
@public_traces
def test_more_gamma_means_more_moves_and_the_middle_is_flat():
    runs = {g: run_policy(build_world(load_scenario(PAPER_TRACES[0], [f"gamma={g}"])), "payback") for g in GAMMAS}
    moves = {gamma: len(run.changes()) for gamma, run in runs.items()}
    assert moves[0.0] < moves[0.1] < moves[0.5] <= moves[1.0]
    middle = [runs[gamma].seconds() for gamma in (0.4, 0.5, 0.65)]
    assert max(middle) < 1.01 * min(middle)
    assert runs[0.0].seconds() > 1.1 * runs[0.5].seconds()


@pytest.mark.slow
@minutes
def test_a_long_run_spends_next_to_nothing_on_layout_transitions_and_gains_by_them():
    world, thrifty = (build_world(load_scenario("long-run-1024", [f"gamma={gamma}"])) for gamma in (0.5, 0.005))
    run, other = (run_policy(each, "payback") for each in (world, thrifty))
    shares = []
    for record in (run.to_record(), other.to_record()):
        assert (record["steps"], record["oom_steps"]) == (1000, 0)
        shares.append(record["layout_transition_s"] / record["total_s"])
    # Published are 0.079%. Moving less reaches that, and costs more than it saves; see the simulator's README.
    assert shares[1] <= 0.00079 < shares[0] <= 0.002
    assert run.seconds() < 0.95 * other.seconds()
