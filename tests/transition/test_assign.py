"""Ranks go where most of their bytes are, without leaving their node."""

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment

from nereus.plan import StagePlan
from nereus.transition.assign import assign_ranks, max_transport, one_node
from nereus.transition.overlap import common_elements
from tests.transition.cases import SPEC, random_stage, stage


def in_place(current: StagePlan, target: StagePlan) -> int:
    """Return the elements of the target that lie where they are wanted."""
    return int(weights(current, target)[np.arange(len(target.devices)), np.arange(len(target.devices))].sum())


def weights(current: StagePlan, target: StagePlan) -> np.ndarray:
    """Return [devices, places]: the elements in place if a device of the target took a place in its list."""
    common = common_elements(SPEC, current.layout, target.layout)
    old = {device: index % current.layout.size for index, device in enumerate(current.devices)}
    ranks = np.arange(len(target.devices)) % target.layout.size
    rows = [common[old[d]][ranks] if d in old else np.zeros(len(ranks), dtype=np.int64) for d in target.devices]
    return np.array(rows)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), num_devices=st.integers(1, 24), node=st.sampled_from([2, 4, 100]))
def test_nothing_lies_better(seed, num_devices, node):
    rng = random.Random(seed)
    current, target = random_stage(rng, num_devices), random_stage(rng, num_devices)
    best = assign_ranks(current, target, SPEC, lambda device: device // node)
    assert sorted(best.devices) == sorted(target.devices) and best.layout == target.layout
    assert [d // node for d in best.devices] == [d // node for d in target.devices]
    weight = weights(current, target).astype(float)
    nodes = np.array(target.devices) // node
    weight[nodes[:, None] != nodes[None, :]] = -1e12
    assert in_place(current, best) == int(weight[linear_sum_assignment(-weight)].sum())
    assert assign_ranks(current, best, SPEC, lambda device: device // node) == best


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), num_devices=st.integers(2, 24))
def test_whole_units_are_kept(seed, num_devices):
    """The same layout on a subset of the devices, in any order: every replica that is whole stays one."""
    rng = random.Random(seed)
    current = random_stage(rng, num_devices)
    kept = rng.sample(current.replicas, rng.randint(1, current.dp))
    devices = [device for replica in kept for device in replica]
    rng.shuffle(devices)
    target = stage(len(kept), current.layout.tp, current.layout.pp, devices)
    assert set(assign_ranks(current, target, SPEC).replicas) == set(kept)


def test_by_hand():
    # Each device of tp 2 holds two quarters; the new ranks 0 and 1 are cut from the old rank 0.
    assert assign_ranks(stage(2, 2, 1), stage(1, 4, 1), SPEC).devices == (0, 2, 1, 3)
    # Nothing is there: the plan's order stays.
    assert assign_ranks(stage(1, 2, 1), stage(1, 2, 1, [3, 2]), SPEC).devices == (3, 2)
    # Device 1 keeps its rank.
    assert assign_ranks(stage(1, 2, 1), stage(1, 2, 1, [1, 2]), SPEC).devices == (2, 1)
    # Not over the border of a node.
    assert assign_ranks(stage(1, 2, 1), stage(1, 2, 1, [1, 2]), SPEC, lambda d: d // 2).devices == (1, 2)
    assert one_node(3) == one_node(0)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_transport_is_the_best_assignment(seed):
    rng = np.random.default_rng(seed)
    rows, columns, total = rng.integers(1, 6), rng.integers(1, 6), rng.integers(1, 20)
    supply = np.bincount(rng.integers(0, rows, total), minlength=rows)
    demand = np.bincount(rng.integers(0, columns, total), minlength=columns)
    weight = rng.integers(0, 5, (rows, columns))
    flow = max_transport(supply, demand, weight)
    assert (flow >= 0).all() and (flow.sum(axis=1) == supply).all() and (flow.sum(axis=0) == demand).all()
    single = weight[np.repeat(np.arange(rows), supply)][:, np.repeat(np.arange(columns), demand)]
    assert (flow * weight).sum() == single[linear_sum_assignment(-single)].sum()
