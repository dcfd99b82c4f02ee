"""A step as events: it takes what the critical path says, and breaks off when devices or memory are gone."""

import random

import pytest

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE
from nereus.cost.load import StepLoad
from nereus.cost.step import JobSpec, estimate_step
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, Plan, StagePlan
from nereus.presets import model_preset
from nereus.simulator.clock import Clock
from nereus.simulator.step import Loss, StepSimulation, step_latency

HEADS = ("lm", "lm", "value", "lm", "score")


def place(dp: int, first: int) -> StagePlan:
    return StagePlan(dp, Layout(), tuple(range(first, first + dp)), 4)


def random_plan(draw: random.Random) -> Plan:
    return Plan.of({name: place(draw.randint(1, 4), draw.randint(0, 4)) for name in MODEL_STAGES})


def keys(plan: Plan) -> list[str]:
    found = [f"{name}/{name.split('.')[1]}" for name in plan]
    return [*found, "actor.training/inference", "critic.training/inference", "weight_sync", "staging"]


def test_events_happen_in_the_order_of_their_times():
    clock, seen = Clock(), []
    clock.after(2, lambda: seen.append((clock.now, "late")))
    clock.after(1, lambda: clock.after(1, lambda: seen.append((clock.now, "caused"))))
    clock.after(0, lambda: seen.append((clock.now, "first")))
    clock.run()
    assert seen == [(0, "first"), (2, "late"), (2, "caused")]


def test_events_come_to_the_critical_path_whatever_overlaps():
    draw = random.Random(0)
    for _ in range(200):
        plan = random_plan(draw)
        seconds = {key: draw.uniform(0.1, 9) for key in keys(plan)}
        clock = Clock()
        run = StepSimulation(clock, plan, seconds).run()
        assert run.broken_by is None
        assert run.seconds == pytest.approx(step_latency(plan, seconds))
        assert clock.now == pytest.approx(run.seconds)


def test_the_critical_path_is_the_cost_models():
    draw = random.Random(1)
    specs = {name: model_preset("smollm2-135m", head) for name, head in zip(MODEL_STAGES, HEADS, strict=True)}  # type: ignore[arg-type]
    job, cluster = JobSpec(specs, StepLoad(64, 2, 100, 200, 230)), cluster_preset("a100-64gb-hdr", 8)
    for _ in range(20):
        plan = random_plan(draw)
        cost = estimate_step(plan, job, cluster, CONSERVATIVE)
        assert step_latency(plan, cost.model_stages_s) == pytest.approx(cost.total_s)


def serial_plan() -> tuple[Plan, dict[str, float]]:
    plan = Plan.of(dict.fromkeys(MODEL_STAGES, place(4, 0)))
    return plan, dict.fromkeys(keys(plan), 10.0)


def test_a_lost_device_breaks_the_step_off_only_if_the_plan_uses_it():
    plan, seconds = serial_plan()
    run = StepSimulation(Clock(), plan, seconds, loss=Loss(frozenset({3}), 25.0)).run()
    assert (run.broken_by, run.devices, run.seconds, run.was_training) == ("lost devices", (3,), 25.0, False)
    late = StepSimulation(Clock(), plan, seconds, loss=Loss(frozenset({3}), 55.0)).run()
    assert late.was_training
    unhurt = StepSimulation(Clock(), plan, seconds, loss=Loss(frozenset({9}), 25.0)).run()
    assert unhurt.broken_by is None
    assert unhurt.seconds == pytest.approx(step_latency(plan, seconds))


def test_memory_runs_out_when_the_hungry_task_starts():
    plan, seconds = serial_plan()

    def overfull(key: str) -> tuple[int, ...]:
        return (2,) if key == "critic.training/training" else ()

    run = StepSimulation(Clock(), plan, seconds, overfull=overfull).run()
    # Generation, four forward passes, and the actor's training come before it.
    assert (run.broken_by, run.devices, run.seconds) == ("out of memory in critic.training/training", (2,), 60.0)
