"""Executed on arrays, in random orders, every graph leaves exactly the target's tensors, element by element."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu import emus_of
from nereus.transition.graph import InfeasibleTransition, plan_transition
from nereus.transition.walk import walk
from tests.transition.cases import LEAST_ROOM, memory_for, random_plan
from tests.transition.stores import Devices


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
