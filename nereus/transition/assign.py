"""Which device takes which rank of a new plan: the order in which most bytes already lie where they are wanted."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan
from nereus.transition.overlap import common_elements

NodeOf = Callable[[int], int]


def one_node(device: int) -> int:
    """Say of every device that it is on the same node."""
    return 0


def assign_ranks(current: StagePlan, target: StagePlan, spec: ModelSpec, node_of: NodeOf = one_node) -> StagePlan:
    """Return the target with its devices permuted so that the elements that lie in place are most.

    A device only changes places with devices of its own node: the links that the plan was chosen for stay as they are.
    Units that both plans can have are kept whole. Ties: the order of the current replicas, then the lowest id.
    """
    if (current.layout, current.devices) == (target.layout, target.devices):
        return target
    size, old_size = target.layout.size, current.layout.size
    placed: list[int | None] = [None] * len(target.devices)
    if current.layout == target.layout:
        for row, devices in _kept(current, target, node_of):
            placed[row * size : (row + 1) * size] = devices
    free = set(target.devices).difference(device for device in placed if device is not None)
    if free:
        old = {device: index for index, device in enumerate(current.devices)}
        common = common_elements(spec, current.layout, target.layout)
        if not _lies_best(placed, target.devices, old, old_size, common):
            _place_rest(placed, free, target, old, current.layout, spec, node_of)
        else:
            placed = [target.devices[at] if device is None else device for at, device in enumerate(placed)]
    assert sorted(d for d in placed if d is not None) == sorted(target.devices), placed
    return replace(target, devices=tuple(device for device in placed if device is not None))


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


def _lies_best(
    placed: Sequence[int | None], devices: Sequence[int], old: dict[int, int], old_size: int, common: np.ndarray
) -> bool:
    """Return whether every device that isn't placed would have most in place where the target names it, on its own."""
    left = [at for at, device in enumerate(placed) if device is None]
    if any(devices[at] in placed for at in left):
        return False
    here = [(old[devices[at]] % old_size, at % common.shape[1]) for at in left if devices[at] in old]
    if not here:
        return True
    old_ranks, ranks = np.array(here).T
    return bool(np.all(common[old_ranks, ranks] == common.max(axis=1)[old_ranks]))


def _place_rest(
    placed: list[int | None],
    free: set[int],
    target: StagePlan,
    old: dict[int, int],
    old_layout: Layout,
    spec: ModelSpec,
    node_of: NodeOf,
) -> None:
    """Fill what is None in `placed`, node by node."""
    size = target.layout.size
    devices_of: dict[int, list[int]] = {}
    for device in sorted(free, key=lambda device: (old.get(device, len(old)) // old_layout.size, device)):
        devices_of.setdefault(node_of(device), []).append(device)
    places_of: dict[int, list[int]] = {}
    for at, device in enumerate(target.devices):
        if placed[at] is None:
            places_of.setdefault(node_of(device), []).append(at)
    for node, devices in devices_of.items():
        # By old rank, the last row for those that hold nothing; and by new rank.
        by_old: list[list[int]] = [[] for _ in range(old_layout.size + 1)]
        for device in devices:
            by_old[old[device] % old_layout.size if device in old else -1].append(device)
        by_new: list[list[int]] = [[] for _ in range(size)]
        for at in places_of[node]:
            by_new[at % size].append(at)
        flow = _best_flow(spec, old_layout, target.layout, tuple(map(len, by_old)), tuple(map(len, by_new)))
        for old_rank, new_rank, count in flow:
            for _ in range(count):
                placed[by_new[new_rank].pop(0)] = by_old[old_rank].pop(0)


@lru_cache(maxsize=1024)
def _best_flow(
    spec: ModelSpec, source: Layout, target: Layout, supply: tuple[int, ...], demand: tuple[int, ...]
) -> tuple[tuple[int, int, int], ...]:
    """Return (old rank, new rank, devices): how many devices of each old rank take each new rank, for most in place.

    Old rank source.size stands for devices that hold nothing.
    """
    common = common_elements(spec, source, target)
    weight = np.concatenate([common, np.zeros((1, target.size), dtype=np.int64)])
    flow = max_transport(np.array(supply), np.array(demand), weight)
    return tuple((int(i), int(j), int(flow[i, j])) for i, j in np.argwhere(flow))


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
