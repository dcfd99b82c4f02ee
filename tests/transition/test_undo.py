"""From any point of any execution there is a way back to the old plan, or the refusal names the last commit."""

import contextlib
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu import emus_of
from nereus.plan import Plan
from nereus.transition.graph import InfeasibleTransition, plan_transition
from nereus.transition.primitives import TransitionGraph
from nereus.transition.undo import plan_undo
from nereus.transition.walk import walk
from tests.transition.cases import LEAST_ROOM, memory_for, random_plan, stage
from tests.transition.stores import Devices

SEEN = Counter()


class Failure(Exception):
    pass


def run_until(graph: TransitionGraph, devices: Devices, rng: random.Random, stop_after: int) -> list[str]:
    """Execute a graph on arrays until some primitives have ended and none is under way; return their ids."""
    done: list[str] = []

    def choose(ready, running):
        if len(done) >= stop_after and not running:
            raise Failure
        is_start = bool(ready) and len(done) < stop_after and (not running or rng.random() < 0.5)
        primitive = rng.choice(ready if is_start else running)
        (devices.start if is_start else devices.end)(primitive)
        if not is_start:
            done.append(primitive.id)
        return is_start, primitive

    with contextlib.suppress(Failure):
        walk(graph, choose)
    return done


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_devices=st.integers(1, 8),
    transport=st.sampled_from(["auto", "staged"]),
    room=st.sampled_from([0, 50_000, 10**7]),
)
def test_every_way_back(seed, num_devices, transport, room):
    rng = random.Random(seed)
    current, target = (random_plan(rng, num_devices) for _ in range(2))
    memory = memory_for(current, target, LEAST_ROOM + room)
    graph = plan_transition(current, target, memory, transport=transport)
    devices = Devices(current)
    done = run_until(graph, devices, rng, rng.randint(0, len(graph.primitives)))
    try:
        back = plan_undo(graph, done, memory)
    except InfeasibleTransition as refusal:
        assert "on the way back" in str(refusal) and room < 10**7
        SEEN["refused"] += 1
        return
    SEEN["ways back"] += 1
    back.validate()

    def choose(ready, running):
        is_start = bool(ready) and (not running or rng.random() < 0.5)
        primitive = rng.choice(ready if is_start else running)
        (devices.start if is_start else devices.end)(primitive)
        return is_start, primitive

    walk(back, choose)
    devices.check(current)


def test_with_room_the_way_back_only_frees():
    rng = random.Random(5)
    current, target = (random_plan(rng, 6) for _ in range(2))
    memory = memory_for(current, target, 10**8)
    graph = plan_transition(current, target, memory)
    done = [p.id for p in graph.primitives if not p.after_commit]
    back = plan_undo(graph, done, memory)
    assert {p.kind for p in back.primitives} == {"destroy"} and back.bytes == 0
    assert set(back.kept) == set(emus_of(current))
    assert plan_undo(graph, [], memory).primitives == ()


def test_what_was_destroyed_is_read_from_the_staged_set():
    plan = Plan.of({"actor.training": stage(1, 2, 1), "critic.training": stage(1, 2, 1, [2, 3])})
    swapped = Plan.of({"actor.training": stage(1, 2, 1, [2, 3]), "critic.training": stage(1, 2, 1)})
    memory = memory_for(plan, swapped, LEAST_ROOM)
    graph = plan_transition(plan, swapped, memory)
    done = [p.id for p in graph.primitives[:3]]
    assert [graph.by_id[id].kind for id in done] == ["stage", "destroy", "extend"]
    kinds = [p.kind for p in plan_undo(graph, done, memory).primitives]
    assert kinds == ["destroy", "restore"]


def test_a_conversion_in_place_that_broke_off_leaves_the_last_commit():
    current, target = Plan.of({"actor.training": stage(1, 2, 1)}), Plan.of({"actor.training": stage(1, 1, 2)})
    memory = memory_for(current, target, 75_000)
    graph = plan_transition(current, target, memory, transport="direct")
    (reshard,) = graph.primitives
    assert reshard.in_place
    with pytest.raises(InfeasibleTransition, match="half old and half new; go back to the last commit"):
        plan_undo(graph, [], memory, failed=[reshard.id])
    (back,) = plan_undo(graph, [reshard.id], memory).primitives
    assert back.in_place and back.makes == reshard.frees
