"""What is planned for one part of the devices holds for all that are like it."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.emu import emus_of
from nereus.plan import MODEL_STAGES, Plan
from nereus.transition import graph as graph_module
from nereus.transition.assign import one_node
from nereus.transition.graph import plan_transition
from nereus.transition.local import sides_of
from nereus.transition.twins import find_twins
from nereus.transition.walk import walk
from tests.transition.cases import LEAST_ROOM, memory_for, random_plan, stage
from tests.transition.test_graph import at_random

TRAINING, GENERATION = "actor.training", "actor.generation"


def repeated(plan: Plan, times: int, num_devices: int) -> Plan:
    """Return a plan that does on each of some blocks of devices what a plan does on the first."""
    return Plan.of(
        {
            name: replace(
                s, dp=s.dp * times, devices=tuple(d + i * num_devices for i in range(times) for d in s.devices)
            )
            for name, s in plan.items()
        }
    )


def both_ways(current: Plan, target: Plan, room: int, **options):
    """Return the graph, and the one that is found without looking for twins."""
    memory = memory_for(current, target, LEAST_ROOM + room)
    graph = plan_transition(current, target, memory, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, "find_twins", lambda *_: ())
        return graph, plan_transition(current, target, memory, **options)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_devices=st.integers(1, 8),
    times=st.integers(2, 6),
    room=st.sampled_from([0, 5_000, 50_000, 10**7]),
    transport=st.sampled_from(["auto", "staged"]),
    staged_set=st.sampled_from(["none", "pending", "committed"]),
)
def test_graphs_of_blocks_keep_the_promises(seed, num_devices, times, room, transport, staged_set):
    rng = random.Random(seed)
    current, target = (repeated(random_plan(rng, num_devices), times, num_devices) for _ in range(2))
    node_of = rng.choice([one_node, lambda device: device // num_devices, lambda device: device // 3])
    options = {"transport": transport, "staged_set": staged_set, "node_of": node_of}
    graph, plain = both_ways(current, target, room, **options)
    graph.validate()
    for _ in range(3):
        walk(graph, at_random(rng))
    assert set(graph.kept) == set(plain.kept)
    if room == 10**7:  # where all fits, both are the same but for whom copies come from
        for same in (lambda p: (p.id, p.kind), lambda p: p.bytes, lambda p: frozenset(p.makes), lambda p: p.frees):
            assert Counter(map(same, graph.primitives)) == Counter(map(same, plain.primitives))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), num_devices=st.integers(1, 6), room=st.sampled_from([0, 50_000, 10**7]))
def test_blocks_of_which_some_have_died(seed, num_devices, room):
    """The same devices of some blocks are lost; some of them are there again, empty."""
    rng = random.Random(seed)
    times = rng.randint(3, 6)
    current, target = (repeated(random_plan(rng, num_devices), times, num_devices) for _ in range(2))
    hit = rng.sample(range(num_devices), rng.randint(1, num_devices))
    lost = {d + i * num_devices for i in rng.sample(range(times), rng.randint(1, times - 1)) for d in hit}
    graph, plain = both_ways(current, target, room, lost=lost, staged_set="committed")
    graph.validate()
    walk(graph, at_random(rng))
    assert set(graph.kept) == set(plain.kept)


def parts_of(before, after, free=10**6, node_of=one_node) -> list[list[tuple[int, ...]]]:
    current, target = Plan.of({TRAINING: before}), Plan.of({TRAINING: after})
    free_bytes = {d: free(d) if callable(free) else free for d in {*current.devices, *target.devices}}
    return [[part.devices for part in twins] for twins in find_twins(sides_of(current, target), free_bytes, node_of)]


def test_parts_are_what_units_join():
    assert parts_of(stage(4, 2, 1), stage(4, 1, 2)) == [[(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert parts_of(stage(4, 2, 1), stage(2, 4, 1)) == [[(0, 1, 2, 3), (4, 5, 6, 7)]]
    # A chain through all devices, and blocks of different kinds.
    assert parts_of(stage(4, 2, 1), stage(3, 2, 1, first=1)) == []
    assert parts_of(stage(2, 2, 1), stage(2, 2, 1, [0, 1, 3, 2])) == []


def test_empty_parts_are_fed_by_others():
    assert parts_of(stage(2, 1, 1), stage(6, 1, 1)) == [[(0, 2, 3), (1, 4, 5)]]
    assert parts_of(stage(1, 1, 1), stage(4, 1, 1)) == []
    current = Plan.of({TRAINING: stage(2, 1, 1), GENERATION: stage(2, 1, 1, first=2)})
    swapped = Plan.of({TRAINING: stage(2, 1, 1, first=2), GENERATION: stage(2, 1, 1)})
    (twins,) = find_twins(sides_of(current, swapped), dict.fromkeys(range(4), 0), one_node)
    assert [set(part.devices) for part in twins] == [{0, 2}, {1, 3}]


def test_twins_have_equal_memory_and_nodes():
    before, after = stage(4, 2, 1), stage(4, 1, 2)
    assert parts_of(before, after, free=lambda device: device % 2) == [[(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert parts_of(before, after, free=lambda device: device // 2) == []
    assert parts_of(before, after, free=lambda device: device // 4) == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]
    assert parts_of(before, after, node_of=lambda device: device // 4) == [[(0, 1), (2, 3), (4, 5), (6, 7)]]
    assert parts_of(before, after, node_of=lambda device: min(device, 4)) == [[(0, 1), (2, 3)], [(4, 5), (6, 7)]]


def test_ids_count_through_all_twins():
    current, target = (Plan.of(dict.fromkeys(MODEL_STAGES, placed)) for placed in (stage(8, 2, 1), stage(8, 1, 2)))
    graph, plain = both_ways(current, target, 10**7)
    assert [p.id for p in graph.primitives] == [p.id for p in plain.primitives]
    assert [p.id for p in graph.primitives[:8]] == [f"{GENERATION}/reshard/{n}" for n in range(8)]
    assert {unit for p in graph.primitives for unit in p.makes} == set(emus_of(graph.target))
