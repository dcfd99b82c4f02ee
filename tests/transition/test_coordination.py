"""Model-stages that change together on nearly full devices: with resource edges nothing ever waits for memory."""

import functools
import random

import pytest

from nereus.simulator.clock import Clock
from nereus.transition.execute import execute, on_clock
from nereus.transition.graph import plan_transition
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Primitive, TransitionGraph
from tests.transition.cases import LEAST_ROOM, memory_for, random_plan
from tests.transition.hold_and_wait import HoldAndWait

KINDS = {
    "same role across stages": ("actor.generation", "actor.training"),
    "different roles in one stage": ("actor.training", "critic.training"),
    "different roles across stages": ("actor.training", "critic.training", "reference.inference", "reward.inference"),
}
TRIALS = 300


@functools.cache
def trial(kind: str, seed: int, most_devices: int = 8) -> tuple[TransitionGraph, TransitionMemory]:
    """Return a transition that asks memory of devices which have next to none to spare."""
    rng = random.Random(f"{kind}/{seed}")
    while True:
        num_devices = rng.randint(2, most_devices)
        current, target = (random_plan(rng, num_devices, KINDS[kind]) for _ in range(2))
        room = LEAST_ROOM + rng.choice([0, 2_000, 20_000])
        memory = memory_for(current, target, room)
        graph = plan_transition(current, target, memory)
        if len({p.model_stage for p in graph.primitives if p.makes}) > 1:
            return graph, memory


class Meter:
    """Counts memory as primitives start and end, and fails where one would have to wait."""

    def __init__(self, graph: TransitionGraph) -> None:
        self.free = dict(graph.free_bytes)

    def start(self, primitive: Primitive) -> None:
        for device, (peak, _) in primitive.memory.items():
            self.free[device] -= peak
            assert not peak or self.free[device] >= 0, f"{primitive.id} would wait for device {device}"

    def end(self, primitive: Primitive) -> None:
        for device, (peak, held) in primitive.memory.items():
            self.free[device] += peak - held


def run_in_virtual_time(graph: TransitionGraph, rng: random.Random) -> dict[str, float]:
    clock, meter = Clock(), Meter(graph)
    lengths = {p.id: rng.random() for p in graph.primitives}

    def started(primitive: Primitive) -> None:
        meter.start(primitive)
        # Events of one moment happen in the order of their making: memory is back before those that wait start.
        clock.after(lengths[primitive.id], lambda: meter.end(primitive))

    return execute(graph, on_clock(clock, lambda primitive: lengths[primitive.id], started))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_ever_waits_for_memory(kind: str):
    for seed in range(TRIALS):
        graph, _ = trial(kind, seed)
        rng = random.Random(seed)
        ends = run_in_virtual_time(graph, rng)
        assert set(ends) == {p.id for p in graph.primitives if not p.after_commit}


@pytest.mark.parametrize("kind", KINDS)
def test_without_resource_edges_transitions_get_stuck(kind: str, record_property):
    stuck = 0
    for seed in range(TRIALS):
        if not HoldAndWait(*trial(kind, seed), random.Random(seed)).run():
            stuck += 1
    record_property("stuck", stuck / TRIALS)
    print(f"{kind}: {stuck} of {TRIALS} stuck without resource edges")
    assert stuck > 0.1 * TRIALS


def test_the_baseline_ends_where_there_is_room():
    for seed in range(30):
        rng = random.Random(seed)
        current, target = (random_plan(rng, 6) for _ in range(2))
        memory = memory_for(current, target, 10**8)
        assert HoldAndWait(plan_transition(current, target, memory), memory, rng).run()
