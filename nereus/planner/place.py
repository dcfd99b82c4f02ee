"""Where model-stages lie in the cluster's order of devices, and who waits for whom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.layout import Layout
from nereus.planner.space import DeviceOrder, Ints


@dataclass(frozen=True, eq=False)
class Place:
    """Where a model-stage lies: `positions` [dp * size] in the cluster's order of devices, in rank order.

    `start` is the first position of a block, None where the positions don't follow each other.
    """

    layout: Layout
    dp: int
    positions: Ints
    start: int | None = None

    @classmethod
    def block(cls, layout: Layout, dp: int, start: int) -> Place:
        """Return neighbouring devices from a position on."""
        return cls(layout, dp, start + np.arange(dp * layout.size), start)

    @cached_property
    def by_replica(self) -> Ints:
        return self.positions.reshape(self.dp, self.layout.size)

    @property
    def end(self) -> int:
        """The position behind a block."""
        assert self.start is not None
        return self.start + len(self.positions)

    def mask(self, num_devices: int) -> NDArray[np.bool_]:
        mask = np.zeros(num_devices, dtype=bool)
        mask[self.positions] = True
        return mask


@dataclass(frozen=True)
class Surroundings:
    """What a place's neighbours make of its speed: see `nereus.cost.options.Options`; `slowdown` of the slowest."""

    tp_across: bool
    pp_across: bool
    nodes: int
    slowdown: float


def surroundings(place: Place, order: DeviceOrder) -> Surroundings:
    """Return what lies on which node."""
    layout, num = place.layout, len(place.positions)
    if place.start is not None:
        whole_groups, whole_replicas = order.crossings(place.start, layout)
        nodes, slowdown = order.num_nodes(place.start, num), order.most_slowdown(place.start, num)
        return Surroundings(num > whole_groups, num > whole_replicas, nodes, slowdown)
    nodes_of = order.node[place.by_replica]
    groups = nodes_of.reshape(-1, layout.tp)
    return Surroundings(
        tp_across=bool((groups != groups[:, :1]).any()),
        pp_across=bool((nodes_of[:, layout.tp :] != nodes_of[:, : -layout.tp]).any()),
        nodes=len(np.unique(nodes_of)),
        slowdown=float(order.slowdown[place.positions].max()),
    )


def in_place(training: Place, generation: Place) -> bool:
    """Return whether every rank of generation lies where the same rank of training does."""
    if training.layout != generation.layout:
        return False
    if training.start is not None and training.start == generation.start:
        return generation.dp <= training.dp
    held = {tuple(replica) for replica in training.by_replica.tolist()}
    return all(tuple(replica) in held for replica in generation.by_replica.tolist())


def num_nodes(places: Sequence[Place], order: DeviceOrder) -> int:
    """Return on how many nodes some places lie; 0 for none."""
    if not places:
        return 0
    if all(place.start == 0 for place in places):
        return int(order.node[max(place.end for place in places) - 1]) + 1
    return len(np.unique(np.concatenate([order.node[place.positions] for place in places])))


def overlaps(places: Mapping[str, Place], num_devices: int) -> list[list[int]]:
    """Return for each place the indices of those before it that share a device with it."""
    all_of_them = list(places.values())
    if all(place.start is not None for place in all_of_them):
        ends = [(place.start or 0, place.end) for place in all_of_them]
        return [[j for j in range(i) if ends[i][0] < ends[j][1] and ends[j][0] < ends[i][1]] for i in range(len(ends))]
    masks = [place.mask(num_devices) for place in all_of_them]
    return [[j for j in range(i) if (masks[i] & masks[j]).any()] for i in range(len(masks))]


def makespan_s(seconds: Sequence[float | None], waits_for: Sequence[Sequence[int]]) -> float:
    """Return when the last ends, if each starts as soon as those that it waits for have ended; None doesn't run."""
    ends: list[float] = []
    for duration, before in zip(seconds, waits_for, strict=True):
        ends.append(0.0 if duration is None else max([ends[j] for j in before], default=0.0) + duration)
    return max(ends, default=0.0)
