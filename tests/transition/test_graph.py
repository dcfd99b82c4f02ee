"""Graphs of random plans keep their promises in every order that their edges allow."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.cluster import Link
from nereus.emu import emus_of
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, Plan
from nereus.transition.assign import one_node
from nereus.transition.graph import InfeasibleTransition, StagedSet, plan_transition
from nereus.transition.local import by_stage
from nereus.transition.primitives import KINDS, Primitive, Reservation, TransitionGraph
from nereus.transition.speeds import Speeds
from nereus.transition.walk import walk
from tests.transition.cases import LEAST_ROOM, memory_for, memory_of, random_plan, stage

TRAINING = "actor.training"


def at_random(rng: random.Random):
    """Return a `choose` that starts and ends at random; each run has its own taste for concurrency."""
    eagerness = rng.random()

    def choose(ready, running):
        is_start = bool(ready) and (not running or rng.random() < eagerness)
        return is_start, rng.choice(ready if is_start else running)

    return choose


def check_in_many_orders(graph: TransitionGraph, rng: random.Random, times: int = 4) -> None:
    graph.validate()
    for _ in range(times):
        walk(graph, at_random(rng))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_devices=st.integers(1, 64),
    room=st.sampled_from([0, 100, 5_000, 50_000, 10**6]),
    transport=st.sampled_from(["auto", "staged"]),
    staged_set=st.sampled_from(["none", "pending", "committed"]),
)
def test_every_transition_is_carried_within_memory(seed, num_devices, room, transport, staged_set):
    rng = random.Random(seed)
    current, target = (random_plan(rng, num_devices) for _ in range(2))
    memory = memory_for(current, target, LEAST_ROOM + room)
    graph = plan_transition(current, target, memory, transport=transport, staged_set=staged_set)
    check_in_many_orders(graph, rng)
    used = {p.transport for p in graph.primitives} - {"none"}
    assert transport != "staged" or used <= {"staged"}
    if staged_set != "none":
        assert all(p.bytes == 0 for p in graph.primitives if p.kind == "stage")
    assert staged_set != "committed" or all(p.kind != "stage" for p in graph.primitives)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_devices=st.integers(1, 64), room=st.sampled_from([0, 5_000, 50_000, 10**6]))
def test_direct_transitions_keep_the_promises_or_are_refused(seed, num_devices, room):
    rng = random.Random(seed)
    current, target = (random_plan(rng, num_devices) for _ in range(2))
    memory = memory_for(current, target, LEAST_ROOM + room)
    try:
        graph = plan_transition(current, target, memory, transport="direct")
    except InfeasibleTransition as refusal:
        assert "on device" in str(refusal) and "direct" in str(refusal)
        return
    assert {p.transport for p in graph.primitives} <= {"direct", "none"}
    check_in_many_orders(graph, rng)


@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32), room=st.sampled_from([0, 50_000, 10**6]))
def test_large_graphs(seed, room):
    rng = random.Random(seed)
    num_devices = rng.choice([256, 512, 1024])
    current, target = (random_plan(rng, num_devices) for _ in range(2))
    graph = plan_transition(current, target, memory_for(current, target, LEAST_ROOM + room))
    check_in_many_orders(graph, rng, times=1)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_devices=st.integers(2, 24),
    room=st.sampled_from([0, 50_000, 10**6]),
    returns=st.booleans(),
)
def test_devices_that_died(seed, num_devices, room, returns):
    """What is left of broken units is freed; state without a whole replica comes from storage, if it is there.

    A device that `returns` is there again, with nothing in it.
    """
    rng = random.Random(seed)
    current = random_plan(rng, num_devices)
    lost = set(rng.sample(range(num_devices), rng.randint(1, num_devices - 1)))
    alive = [device for device in range(num_devices) if device not in lost or (returns and rng.random() < 0.5)]
    if not alive:
        alive = [0]
    target = random_plan(rng, len(alive))
    target = Plan.of({name: replace(s, devices=tuple(alive[d] for d in s.devices)) for name, s in target.items()})
    memory = memory_for(current, target, LEAST_ROOM + room)
    graph = plan_transition(current, target, memory, lost=lost, staged_set="committed")
    check_in_many_orders(graph, rng)
    whole = {unit.model_stage for unit in emus_of(current) if lost.isdisjoint(unit.devices)}
    trained_and_lost = {"actor.training", "critic.training"} - whole
    if trained_and_lost:
        with pytest.raises(InfeasibleTransition, match=r"no replica of .* resume from the last commit"):
            plan_transition(current, target, memory, lost=lost)


def without(graph: TransitionGraph, edge_of: Primitive, edge: str) -> TransitionGraph:
    """Return the graph with one edge left out."""
    changed = replace(
        edge_of,
        depends_on=tuple(id for id in edge_of.depends_on if id != edge),
        resource_edges=tuple(id for id in edge_of.resource_edges if id != edge),
    )
    return replace(graph, primitives=tuple(changed if p is edge_of else p for p in graph.primitives))


def test_the_walk_sees_a_missing_edge():
    """The checks themselves can fail: without one resource edge, some order goes over the cap."""
    seen = Counter()
    for seed in range(30):
        rng = random.Random(seed)
        current, target = (random_plan(rng, 6) for _ in range(2))
        graph = plan_transition(current, target, memory_for(current, target, LEAST_ROOM))
        for primitive in graph.primitives:
            for edge in primitive.resource_edges:
                try:
                    without(graph, primitive, edge).validate()
                except AssertionError as error:
                    seen["cap" if "over the cap" in str(error) else "other"] += 1
                else:
                    seen["unseen"] += 1
    # Many edges are implied by others, and few orders don't find all that aren't.
    assert seen["cap"] > 100 and not seen["other"], seen


def test_a_broken_promise_is_named():
    plan, wide = Plan.of({TRAINING: stage(1, 1, 1)}), Plan.of({TRAINING: stage(1, 1, 1, [1])})
    graph = plan_transition(plan, wide, memory_of(dict.fromkeys(range(2), 10**7)))
    extend, destroy = graph.primitives
    first = replace(graph, primitives=(replace(destroy, after_commit=False), extend))
    with pytest.raises(AssertionError, match="has no copy"):
        first.validate()
    with pytest.raises(AssertionError, match="come later"):
        replace(graph, primitives=(replace(extend, depends_on=("x",)), destroy)).validate()
    with pytest.raises(AssertionError, match="ends with"):
        replace(graph, primitives=(destroy,)).validate()
    with pytest.raises(AssertionError, match="over the cap of device 1"):
        replace(graph, primitives=(replace(extend, memory={1: Reservation(10**8, 0)}), destroy)).validate()


def test_micro_batch_and_recomputation_move_nothing():
    plan = Plan.of({name: stage(2, 2, 1) for name in MODEL_STAGES})
    other = plan.with_stage(TRAINING, micro_batch=7, recompute=True)
    graph = plan_transition(plan, other, memory_for(plan, other, 0))
    assert graph.primitives == () and graph.target == other
    assert set(graph.kept) == set(emus_of(plan))


def test_the_local_order_is_kept():
    """Stage, split, destroy, extend or restore, then what makes larger units; destroys come when they are due."""
    for seed in range(40):
        rng = random.Random(seed)
        current, target = (random_plan(rng, 8) for _ in range(2))
        graph = plan_transition(current, target, memory_for(current, target, 10**7), staged_set="none")
        for name in target:
            order = [KINDS.index(p.kind) for p in graph.primitives if p.model_stage == name and p.kind != "destroy"]
            assert order == sorted(order)
        names = [p.model_stage for p in graph.primitives if not p.after_commit]
        assert names == sorted(names, key=by_stage(target).index)  # with room for all, ties are the only order
        assert all(p.after_commit == (p.kind == "destroy") for p in graph.primitives)
        assert not any(p.resource_edges for p in graph.primitives)


def test_the_last_replica_outlives_its_copy():
    """Devices that hold one unit each, at their brim: the old unit goes only after the new one is there."""
    plan, moved = Plan.of({TRAINING: stage(1, 2, 1)}), Plan.of({TRAINING: stage(1, 2, 1, [2, 3])})
    others = Plan.of({TRAINING: stage(1, 2, 1), "critic.training": stage(1, 2, 1, [2, 3])})
    swapped = Plan.of({TRAINING: stage(1, 2, 1, [2, 3]), "critic.training": stage(1, 2, 1)})
    graph = plan_transition(plan, moved, memory_for(plan, moved, LEAST_ROOM), transport="direct")
    assert [(p.kind, p.after_commit) for p in graph.primitives] == [("extend", False), ("destroy", True)]
    memory = memory_for(others, swapped, LEAST_ROOM)
    with pytest.raises(
        InfeasibleTransition, match=r"making actor.training takes .* on device [23], where .* can be free"
    ):
        plan_transition(others, swapped, memory, transport="direct")
    graph = plan_transition(others, swapped, memory)
    kinds = [(p.model_stage.split(".")[0], p.kind) for p in graph.primitives]
    assert ("critic", "stage") in kinds and ("critic", "restore") in kinds  # the smaller of the two: no vocabulary head
    stage_at, destroy_at = kinds.index(("critic", "stage")), kinds.index(("critic", "destroy"))
    assert stage_at < destroy_at and graph.primitives[stage_at].id in graph.primitives[destroy_at].depends_on
    graph.validate()


@pytest.mark.parametrize("transport", ["direct", "staged"])
@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (stage(1, 3, 1), stage(1, 1, 2), {"reshard"}),
        (stage(3, 1, 1), stage(1, 1, 1), set()),
        (stage(1, 1, 1), stage(3, 1, 1), {"extend"}),
        (stage(1, 2, 2), stage(2, 2, 1), {"split"}),
        (stage(2, 1, 2), stage(1, 2, 2), {"merge"}),
        (stage(1, 4, 1), stage(1, 1, 4), {"reshard"}),
        (stage(1, 2, 1), stage(1, 2, 1, first=1), {"move"}),
        (stage(2, 3, 1), stage(3, 1, 2), {"reshard"}),
        (stage(1, 4, 1), stage(1, 2, 1), {"split"}),
    ],
)
def test_degrees_of_any_kind(before, after, kinds, transport):
    current, target = Plan.of({TRAINING: before}), Plan.of({TRAINING: after})
    memory = memory_for(current, target, 10**7)
    graph = plan_transition(current, target, memory, transport=transport)
    made = {p.kind for p in graph.primitives} - {"destroy"}
    assert made == (kinds if transport == "direct" else {"stage", "restore"} if kinds else set())
    graph.validate()


def test_shrinking_by_whole_replicas_moves_nothing():
    current, target = Plan.of({TRAINING: stage(3, 1, 2)}), Plan.of({TRAINING: stage(2, 1, 2, first=2)})
    (destroy,) = plan_transition(current, target, memory_for(current, target, 0)).primitives
    assert destroy.kind == "destroy" and destroy.after_commit and destroy.bytes == 0
    assert [unit.devices for unit in destroy.frees] == [(0, 1)]


def test_a_rank_that_stays_is_taken_over():
    """tp 2 moves by one device: the rank on the common one keeps its tensors, half of the state travels."""
    current, target = Plan.of({TRAINING: stage(1, 2, 1)}), Plan.of({TRAINING: stage(1, 2, 1, first=1)})
    memory = memory_for(current, target, LEAST_ROOM)
    move, destroy = plan_transition(current, target, memory, transport="direct").primitives
    assert move.makes[0].devices == (2, 1) and move.shares == (1,) and destroy.memory.keys() == {0}
    assert move.bytes == memory.wanted(TRAINING, Layout(2, 1))[0]
    # Its old half goes with the old unit, the other stays.
    assert destroy.memory[0].held == -memory.held(TRAINING, Layout(2, 1))[0]


def test_a_full_device_is_converted_in_place():
    current, target = Plan.of({TRAINING: stage(1, 2, 1)}), Plan.of({TRAINING: stage(1, 1, 2)})
    held = memory_for(current, target, 0).usable_bytes
    layer = 75_000  # more than the state of one of the six layers
    memory = memory_of({device: count + layer for device, count in held.items()})
    (reshard,) = plan_transition(current, target, memory, transport="direct").primitives
    assert reshard.in_place and reshard.frees[0].layout == Layout(2, 1)
    assert all(0 < reshard.memory[device].peak <= layer for device in (0, 1))
    roomy = plan_transition(current, target, memory_for(current, target, 10**7), transport="direct")
    assert [(p.kind, p.in_place, p.after_commit) for p in roomy.primitives] == [
        ("reshard", False, False),
        ("destroy", False, True),
    ]


def test_what_is_still_to_be_read_gives_way_last():
    """Three blocks, each a little different, with room for conversions in place: no block reads another's copy."""
    current, target = (Plan.of(dict.fromkeys(MODEL_STAGES, placed)) for placed in (stage(3, 2, 1), stage(3, 1, 2)))
    room = memory_for(current, target, 100_000).usable_bytes
    memory = memory_of({device: count + device for device, count in room.items()})
    graph = plan_transition(current, target, memory, transport="direct")
    graph.validate()
    made = [p for p in graph.primitives if p.makes]
    assert any(p.in_place for p in made)
    assert all(set(unit.devices) == set(p.makes[0].devices) for p in made for unit in p.reads)


def test_generation_is_filled_from_training_where_that_lies_closer():
    """Generation moves onto the devices of training, where all of its weights are already."""
    current = Plan.of({"actor.generation": stage(1, 1, 1), TRAINING: stage(1, 1, 1, [1])})
    target = Plan.of({"actor.generation": stage(1, 1, 1, [1]), TRAINING: stage(1, 1, 1, [1])})
    extend = plan_transition(current, target, memory_for(current, target, 10**6)).primitives[0]
    assert [unit.model_stage for unit in extend.reads] == [TRAINING] and extend.bytes == 0


def test_generation_gives_way_and_comes_back_from_training():
    """No room for two copies anywhere: the old generation unit goes first, since training holds all that it knew."""
    current = Plan.of({"actor.generation": stage(1, 1, 1), TRAINING: stage(1, 1, 1, [1])})
    target = Plan.of({"actor.generation": stage(1, 1, 1, [1]), TRAINING: stage(1, 1, 1, [0])})
    held = memory_for(current, target, LEAST_ROOM)
    graph = plan_transition(current, target, held, transport="direct")
    graph.validate()
    first = graph.primitives[0]
    assert (first.model_stage, first.kind, first.after_commit) == ("actor.generation", "destroy", False)


def test_copies_are_copied():
    """One replica becomes 16: about log2(16) rounds, not 15 from one sender."""
    current, target = Plan.of({TRAINING: stage(1, 1, 1)}), Plan.of({TRAINING: stage(16, 1, 1)})
    graph = plan_transition(current, target, memory_for(current, target, 10**7))
    depth: dict[str, int] = {}
    for p in graph.primitives:
        depth[p.id] = 1 + max((depth[id] for id in p.depends_on), default=0)
    assert max(depth.values()) <= 5
    assert max(Counter(p.reads[0].devices[0] for p in graph.primitives).values()) <= 5


def test_a_device_that_is_not_there_is_refused():
    plan, other = Plan.of({TRAINING: stage(1, 1, 1)}), Plan.of({TRAINING: stage(1, 1, 1, [5])})
    with pytest.raises(ValueError, match="the new plan names device 5, but there are only 0"):
        plan_transition(plan, other, memory_for(plan, plan, 0))


def test_a_target_that_never_fits_is_refused_with_the_numbers():
    current, target = Plan.of({TRAINING: stage(1, 2, 1)}), Plan.of({TRAINING: stage(1, 1, 1)})
    memory = memory_of(memory_for(current, current, LEAST_ROOM).usable_bytes)
    with pytest.raises(InfeasibleTransition, match=r"the new plan doesn't fit: making actor.training takes .* KiB"):
        plan_transition(current, target, memory)


def test_storage_is_taken_where_it_is_priced_lower():
    current = Plan.of({name: stage(1, 1, 1) for name in MODEL_STAGES})
    target = Plan.of({name: stage(3, 1, 1) for name in MODEL_STAGES})
    memory = memory_for(current, target, 10**7)

    def staged(near: float, read: float, staged_set: StagedSet = "committed") -> set[str]:
        link = Link(near, 0.0)
        speeds = Speeds(one_node, near=link, far=link, write=Link(1.0, 0.0), read=Link(read, 0.0), copy_bytes_s=1e12)
        graph = plan_transition(current, target, memory, speeds=speeds, staged_set=staged_set)
        graph.validate()
        return {p.model_stage for p in graph.primitives if p.transport == "staged"}

    assert staged(1e9, 1e6) == set()
    assert staged(1e6, 1e9) == set(MODEL_STAGES)
    # What is trained would have to be written first; frozen models and what both actors share lie elsewhere already.
    assert staged(1e6, 1e9, "none") == {"reference.inference", "reward.inference"}
