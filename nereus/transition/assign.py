"""Which device takes which rank of a new plan: the order in which most bytes already lie where they are wanted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan
from nereus.transition.memory import TransitionMemory
from nereus.transition.overlap import common_elements

NodeOf = Callable[[int], int]


def one_node(device: int) -> int:
    """Say of every device that it is on the same node."""
    return 0


def assign_devices(
    current: Plan, target: Plan, memory: TransitionMemory, lost: Collection[int], node_of: NodeOf
) -> Plan:
    """Return the target with each model-stage's devices in the order that moves least, as far as its steps then fit."""
    stages: dict[str, StagePlan] = {}
    known: dict[tuple[Any, ...], tuple[int, ...]] = {}  # model-stages often lie on the same devices
    for name, stage in target.items():
        old, spec = current[name], memory.specs[name]
        live = [replica for replica in old.replicas if not lost or set(lost).isdisjoint(replica)]
        if live:
            if len(live) < old.dp:
                old = replace(old, dp=len(live), devices=tuple(device for replica in live for device in replica))
            key = (spec, old.layout, old.devices, stage.layout, stage.devices)
            if key not in known:
                known[key] = assign_ranks(old, stage, spec, node_of).devices
            stages[name] = stage if known[key] == stage.devices else replace(stage, devices=known[key])
    best = Plan.of({**dict(target.items()), **stages})
    if best == target or memory.takes(best):
        return best
    for name, stage in stages.items():
        changed = target.with_stage(name, devices=stage.devices)
        if memory.takes(changed):
            target = changed
    return target


def assign_ranks(current: StagePlan, target: StagePlan, spec: ModelSpec, node_of: NodeOf = one_node) -> StagePlan:
    """Return the target with its devices permuted so that the elements that lie in place are most.

    A device only changes places with devices of its own node: the links that the plan was chosen for stay as they are.
    Units that both plans can have are kept whole. Ties: the order of the current replicas, then the lowest id.
    """
    if (current.layout, current.devices) == (target.layout, target.devices):
        return target
    placed = list(target.devices)
    places = list(range(len(placed)))
    if current.layout == target.layout:
        size = target.layout.size
        kept = dict(_kept(current, target, node_of))
        for row, devices in kept.items():
            placed[row * size : (row + 1) * size] = devices
        places = [at for at in places if at // size not in kept]
        taken = {device for devices in kept.values() for device in devices}
        free = [device for device in target.devices if device not in taken]
    else:
        free = placed.copy()
    if free:
        _place(placed, places, free, current, target.layout, spec, node_of)
    assert sorted(placed) == sorted(target.devices), placed
    return replace(target, devices=tuple(placed))


def _kept(current: StagePlan, target: StagePlan, node_of: NodeOf) -> Iterable[tuple[int, tuple[int, ...]]]:
    """Yield (replica of the target, devices) of the units that stay as they are, each once."""
    wanted = set(target.devices)
    old = [devices for devices in current.replicas if wanted.issuperset(devices)]
    same = set(old).intersection(target.replicas)
    rest: dict[tuple[int, ...], list[int]] = {}
    for row, devices in enumerate(target.replicas):
        if devices in same:
            yield row, devices
        elif len(same) < len(old):
            rest.setdefault(tuple(map(node_of, devices)), []).append(row)
    for devices in old:
        rows = rest.get(tuple(map(node_of, devices))) if devices not in same else None
        if rows:
            yield rows.pop(0), devices


def _place(
    placed: list[int],
    places: Sequence[int],
    free: Sequence[int],
    current: StagePlan,
    layout: Layout,
    spec: ModelSpec,
    node_of: NodeOf,
) -> None:
    """Give the free devices to the places that are left, node by node; nothing changes where all lies best already."""
    index = {device: number for number, device in enumerate(current.devices)}
    old = np.array([index.get(device, -1) for device in free])
    old_rank = np.where(old >= 0, old % current.layout.size, current.layout.size)
    rank = np.array(places) % layout.size
    weight = _weight(spec, current.layout, layout)
    unmoved = [placed[at] for at in places] == list(free)
    if unmoved and (weight[old_rank, rank] == weight.max(axis=1)[old_rank]).all():
        return
    # Places by node in the order of the list; devices by node, then by current replica, then by id.
    node = np.array(list(map(node_of, free)))
    by_place = np.lexsort(np.array([places, [*map(node_of, [placed[at] for at in places])]]))
    replica = np.where(old >= 0, old // current.layout.size, current.dp)
    by_device = np.lexsort((np.array(free), replica, node))
    taken = np.empty_like(by_device)
    starts = np.flatnonzero(np.diff(node[by_device], prepend=-1))
    sizes = np.diff(starts, append=len(by_device))
    for size in np.unique(sizes).tolist():
        rows = starts[sizes == size, None] + np.arange(size)
        at, devices = by_place[rows], by_device[rows]
        # What fits one node best, fits all that have the same old ranks to give to the same places.
        table = np.hstack([old_rank[devices], rank[at]])
        alike: dict[bytes, list[int]] = {}
        for row, ranks in enumerate(table):
            alike.setdefault(ranks.tobytes(), []).append(row)
        for same in alike.values():
            ranks = table[same[0]].tolist()
            choice = _best_choice(spec, current.layout, layout, tuple(ranks[:size]), tuple(ranks[size:]))
            taken[at[same]] = devices[same][:, choice]
    for place, chosen in zip(places, taken.tolist(), strict=True):
        placed[place] = free[chosen]


def _weight(spec: ModelSpec, source: Layout, target: Layout) -> np.ndarray:
    """Return int64 [source.size + 1, target.size]: elements in common; the last row is of devices that hold nothing."""
    common = common_elements(spec, source, target)
    return np.concatenate([common, np.zeros((1, target.size), dtype=np.int64)])


@lru_cache(maxsize=4096)
def _best_choice(
    spec: ModelSpec, source: Layout, target: Layout, old_ranks: tuple[int, ...], ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """Return for each place which device takes it: those of equal old ranks in their order.

    Args:
        old_ranks: of the devices; source.size where there is none.
        ranks: of the places.
    """
    weight = _weight(spec, source, target)
    flow = max_transport(
        np.bincount(old_ranks, minlength=source.size + 1), np.bincount(ranks, minlength=target.size), weight
    )
    devices = {old: [i for i, other in enumerate(old_ranks) if other == old] for old in set(old_ranks)}
    takers = {
        rank: [devices[int(old)].pop(0) for old in np.flatnonzero(flow[:, rank]) for _ in range(flow[old, rank])]
        for rank in sorted(set(ranks))
    }
    return tuple(takers[rank].pop(0) for rank in ranks)


def max_transport(supply: np.ndarray, demand: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the int64 flow [rows, columns] with row sums `supply`, column sums `demand` and the most total weight.

    Successive longest paths in the residual graph, each found by relaxing rows and columns in turn (Bellman and Ford);
    exact for integers. Both sums must be equal. Ties: the lowest row, then the lowest column.
    """
    flow = np.zeros(weight.shape, dtype=np.int64)
    supply, demand = supply.astype(np.int64), demand.astype(np.int64)
    while supply.any():
        path = _longest_path(supply, demand, weight, flow)
        # (row, column) forward, and between two of them back from the next one's column to this row.
        back = [(row, column) for (row, _), (_, column) in itertools.pairwise(path)]
        start, end = path[-1][0], path[0][1]
        amount = min(int(supply[start]), int(demand[end]), *(int(flow[at]) for at in back))
        for at in path:
            flow[at] += amount
        for at in back:
            flow[at] -= amount
        supply[start] -= amount
        demand[end] -= amount
    return flow


def _longest_path(
    supply: np.ndarray, demand: np.ndarray, weight: np.ndarray, flow: np.ndarray
) -> list[tuple[int, int]]:
    """Return the forward steps (row, column) of the longest residual path, the last one first."""
    lowest = -(2**61)
    gain = np.where(supply > 0, 0, lowest)
    reached = np.full(len(demand), lowest)
    row_of, column_of = np.full(len(demand), -1), np.full(len(supply), -1)
    while True:
        # Only what is better replaces a predecessor: ties would close circles of them.
        through = gain[:, None] + weight
        better = through.max(axis=0) > reached
        row_of = np.where(better, through.argmax(axis=0), row_of)
        reached = np.where(better, through.max(axis=0), reached)
        back = np.where(flow > 0, reached[None, :] - weight, lowest)
        better = back.max(axis=1) > gain
        if not better.any():
            break
        column_of = np.where(better, back.argmax(axis=1), column_of)
        gain = np.where(better, back.max(axis=1), gain)
    column = int(np.where(demand > 0, reached, lowest).argmax())
    path = [(int(row_of[column]), column)]
    while column_of[path[-1][0]] >= 0:
        back_column = int(column_of[path[-1][0]])
        path.append((int(row_of[back_column]), back_column))
    return path
