"""Executed on arrays, in random orders, every graph leaves exactly the target's tensors, element by element."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu import emus_of
from nereus.model.spec import num_parameters, tensors
from nereus.plan import Plan
from nereus.transition.copies import copies_of, restoration_of
from nereus.transition.graph import InfeasibleTransition, plan_transition
from nereus.transition.walk import walk
from tests.transition.cases import LEAST_ROOM, SPECS, memory_for, random_plan, stage
from tests.transition.stores import Devices


@pytest.mark.parametrize("transport", ["direct", "staged"])
def test_what_is_taken_over_is_not_copied(transport):
    """tp 2 moves by one device: the rank on the common device keeps its tensors."""
    current, target = (Plan.of({"actor.training": stage(1, 2, 1, first=first)}) for first in (0, 1))
    graph = plan_transition(current, target, memory_for(current, target, LEAST_ROOM), transport=transport)
    made = next(p for p in graph.primitives if p.makes)
    assert made.shares == (1,)
    if transport == "direct":
        assert {copy.target for copy in copies_of(made, SPECS)} == {2}
    else:
        restoration = restoration_of(made, SPECS)
        assert restoration.copies == () and set(restoration.missing) == {2}


def test_a_restore_reads_only_what_is_not_there():
    """tp 2 becomes one: the device that held the first half reads the second."""
    current, target = Plan.of({"actor.training": stage(1, 2, 1)}), Plan.of({"actor.training": stage(1, 1, 1)})
    graph = plan_transition(current, target, memory_for(current, target, 10**7), transport="staged")
    restore = next(p for p in graph.primitives if p.kind == "restore")
    restoration = restoration_of(restore, SPECS)
    assert {(copy.source, copy.target) for copy in restoration.copies} == {(0, 0)}
    read = sum(part.num_elements for part in restoration.missing[0])
    assert 12 * read == restore.bytes
    norms = sum(info.shape[0] for info in tensors(SPECS["actor.training"]).values() if info.split is None)
    assert read == (num_parameters(SPECS["actor.training"]) - norms) // 2


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_devices=st.integers(1, 8),
    transport=st.sampled_from(["auto", "direct", "staged"]),
    room=st.sampled_from([0, 50_000, 10**7]),
)
def test_the_target_holds_the_state(seed, num_devices, transport, room):
    rng = random.Random(seed)
    current, target = (random_plan(rng, num_devices) for _ in range(2))
    memory = memory_for(current, target, LEAST_ROOM + room)
    try:
        graph = plan_transition(current, target, memory, transport=transport)
    except InfeasibleTransition:
        assert transport == "direct"
        return
    devices = Devices(current)

    def choose(ready, running):
        """Start at random; a primitive does its work when it ends."""
        is_start = bool(ready) and (not running or rng.random() < 0.5)
        primitive = rng.choice(ready if is_start else running)
        (devices.start if is_start else devices.end)(primitive)
        return is_start, primitive

    walk(graph, choose)
    for primitive in graph.primitives:
        if primitive.after_commit:
            devices.start(primitive)
    devices.check(graph.target)


@pytest.mark.parametrize("seed", range(12))
def test_bytes_are_those_of_the_copies(seed):
    """What a primitive that reads the old plan says it moves is what its copies move between devices."""
    rng = random.Random(seed)
    current, target = (random_plan(rng, 6) for _ in range(2))
    memory = memory_for(current, target, 10**7)
    graph = plan_transition(current, target, memory, transport="direct")
    for primitive in graph.primitives:
        if primitive.makes and set(primitive.reads) <= set(emus_of(current)):
            devices = Devices(current)
            devices.start(primitive)
            size = memory.element_bytes(primitive.model_stage)
            assert devices.travelled_elements * size == primitive.bytes, primitive
