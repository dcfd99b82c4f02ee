"""The plan space: which layouts and replica counts a model-stage may have, and where its block of devices may lie."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from nereus.cluster import Cluster
from nereus.layout import Layout
from nereus.model.spec import ModelSpec

Ints = NDArray[np.int64]

# Up to so many devices every degree of tp and pp is tried, beyond only powers of two and the current plan's.
EVERY_DEGREE_UP_TO = 16
# Up to so many devices every dp is tried. Beyond, the least one for each size of the largest share, down to an
# eighth of what the devices allow: fewer replicas would need that much longer.
EVERY_DP_UP_TO = 64
LEAST_DP_SHARE = 8


def layouts_for(spec: ModelSpec, num_devices: int, also: Iterable[Layout] = ()) -> tuple[Layout, ...]:
    """Return the layouts that a model allows on some devices, in ascending order.

    Args:
        also: layouts of the current plan; their degrees are tried on any number of devices.
    """
    most_tp, most_pp = min(spec.kv_heads, num_devices), min(spec.layers, num_devices)
    tps, pps = _degrees(most_tp, num_devices), _degrees(most_pp, num_devices)
    tps |= {layout.tp for layout in also if layout.tp <= most_tp}
    pps |= {layout.pp for layout in also if layout.pp <= most_pp}
    return tuple(Layout(tp, pp) for tp, pp in itertools.product(sorted(tps), sorted(pps)) if tp * pp <= num_devices)


def _degrees(most: int, num_devices: int) -> set[int]:
    if num_devices <= EVERY_DEGREE_UP_TO:
        return set(range(1, most + 1))
    return {2**k for k in range(most.bit_length())}


def replica_counts(stage: str, size: int, num_devices: int, samples: int, minibatches: int) -> Ints:
    """Return the dp to try for replicas of some devices each, ascending.

    Up to the samples of the smallest minibatch in training, else those of the step.
    """
    most = min(num_devices // size, samples // minibatches if stage == "training" else samples)
    if num_devices <= EVERY_DP_UP_TO or most == 0:
        return np.arange(1, most + 1)
    if stage == "generation":
        # It has its stage to itself, so fewer devices than all are of use only where a critic needs the others' memory.
        parts = num_devices // 2 ** np.arange(LEAST_DP_SHARE.bit_length())
        return np.unique(np.clip(parts // size, 1, most))
    counts = np.arange(max(1, most // LEAST_DP_SHARE), most + 1)
    shares = -(-samples // counts)
    if stage == "training":
        minibatch = -(-samples // minibatches)
        shares = shares * (samples + 1) + -(-minibatch // counts)
    return counts[np.unique(shares, return_index=True)[1]][::-1].copy()


def micro_batch_steps(share: Ints, pp: Ints, most: int | None) -> Ints:
    """Return [n, k] micro-batches: a pp-th of the share, so that pipeline stages fill, then halves down to 1.

    Args:
        most: samples that one may have; None: no matter how many.
    """
    first = -(-share // pp)
    if most is not None:
        first = np.minimum(first, most)
    halvings = np.arange(int(first.max() - 1).bit_length() + 1)
    return -(-first[:, None] // 2**halvings)


@dataclass(frozen=True, eq=False)
class Rows:
    """Layouts and replica counts of one model-stage that are tried, int64 arrays [n]; `layout` indexes `layouts`.

    Rows are ordered by layout, then by dp.
    """

    layouts: tuple[Layout, ...]
    layout: Ints
    dp: Ints

    @cached_property
    def tp(self) -> Ints:
        return np.array([layout.tp for layout in self.layouts], dtype=np.int64)[self.layout]

    @cached_property
    def pp(self) -> Ints:
        return np.array([layout.pp for layout in self.layouts], dtype=np.int64)[self.layout]

    @cached_property
    def size(self) -> Ints:
        """Devices of one replica."""
        return self.tp * self.pp

    @cached_property
    def devices(self) -> Ints:
        return self.dp * self.size

    def __len__(self) -> int:
        return len(self.dp)

    def take(self, index: NDArray) -> Rows:
        return Rows(self.layouts, self.layout[index], self.dp[index])


@lru_cache(maxsize=256)
def rows_for(stage: str, layouts: tuple[Layout, ...], num_devices: int, samples: int, minibatches: int) -> Rows:
    """Return all rows of a stage's model-stage on some devices.

    Args:
        samples, minibatches: of a step.
    """
    counts = [replica_counts(stage, each.size, num_devices, samples, minibatches) for each in layouts]
    layout = np.repeat(np.arange(len(layouts)), [len(each) for each in counts])
    return Rows(layouts, layout, np.concatenate(counts))


@dataclass(frozen=True)
class DeviceOrder:
    """The devices of a cluster in their order: node by node. Positions count from 0.

    `usable_bytes` is what a plan may take of each device, `slowdown` how many times longer it takes than others.
    """

    ids: tuple[int, ...]
    node: Ints
    usable_bytes: Ints
    slowdown: NDArray[np.float64]
    _borders: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, cluster: Cluster, usable_share: float, device_factor: Mapping[int, float]) -> DeviceOrder:
        ids = cluster.device_ids
        nodes = np.unique([device.node for device in cluster.devices], return_inverse=True)[1]
        usable = (np.array([device.memory_bytes for device in cluster.devices]) * usable_share).astype(np.int64)
        return cls(ids, nodes, usable, np.array([device_factor.get(device, 1.0) for device in ids]))

    def __len__(self) -> int:
        return len(self.ids)

    def crossings(self, start: int, layout: Layout) -> tuple[int, int]:
        """Return how many devices from `start` on form whole tp groups, and replicas, before one crosses nodes.

        A tp group crosses where its ranks lie on two nodes, a replica where neighbouring stages' same ranks do.
        """
        key = (start, layout.tp, layout.pp)
        if key not in self._borders:
            nodes = self.node[start:]
            groups = nodes[: len(nodes) // layout.tp * layout.tp].reshape(-1, layout.tp)
            across = _first(groups[:, 0] != groups[:, -1]) * layout.tp
            replicas = nodes[: len(nodes) // layout.size * layout.size].reshape(-1, layout.size)
            hops = (replicas[:, layout.tp :] != replicas[:, : -layout.tp]).any(axis=1)
            self._borders[key] = across, _first(hops) * layout.size
        return self._borders[key]

    def most_slowdown(self, start: int, num: int) -> float:
        return float(self.slowdown[start : start + num].max())

    def num_nodes(self, start: int, num: int) -> int:
        return int(self.node[start + num - 1] - self.node[start]) + 1


def _first(flags: NDArray[np.bool_]) -> int:
    """Return the index of the first true one, or a number beyond any where there is none."""
    return int(flags.argmax()) if flags.any() else 1 << 40
