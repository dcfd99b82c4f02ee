"""What a piece of a step asks of each operation class: how often its latency is paid, and how much work it is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nereus.cost.efficiency import CLASSES, Efficiencies

__all__ = ["CLASSES", "COMPUTE_CLASSES", "Array", "Operations", "add_operations"]

Array = NDArray[np.float64]

# What runs inside a device, so a slow device takes longer for it.
COMPUTE_CLASSES = ("gemm", "attention", "decode")


@dataclass(frozen=True)
class Operations:
    """What plan options ask of each class, on the slowest replica's critical path; absent classes ask nothing.

    `count` is how often the latency of the class is paid, `work_s` the seconds of its work at the nominal peak, both
    float64 arrays with one element an option (or scalars). `host` counts micro-batches and decoding passes.

    Time = sum over classes of count * latency + work_s / efficiency, plus host * overhead.
    """

    count: Mapping[str, Array] = field(default_factory=dict)
    work_s: Mapping[str, Array] = field(default_factory=dict)
    host: Array | float = 0.0

    def __post_init__(self) -> None:
        assert set(self.count) | set(self.work_s) <= set(CLASSES), (self.count.keys(), self.work_s.keys())

    def times(self, factor: Array | float) -> Operations:
        """Return the same operations `factor` times."""
        return Operations(
            {name: factor * array for name, array in self.count.items()},
            {name: factor * array for name, array in self.work_s.items()},
            factor * self.host,
        )

    def seconds(self, efficiencies: Efficiencies, slowdown: Array | float = 1.0) -> dict[str, Array]:
        """Return seconds by class, and under "host" those of the host.

        Args:
            slowdown: how many times longer the slowest device takes for what runs inside it.
        """
        result: dict[str, Array] = {}
        for name in CLASSES:
            if name not in self.count and name not in self.work_s:
                continue
            seconds = np.asarray(
                self.count.get(name, 0.0) * efficiencies.latency_s[name]
                + self.work_s.get(name, 0.0) / efficiencies.efficiency[name]
            )
            result[name] = seconds * slowdown if name in COMPUTE_CLASSES else seconds
        result["host"] = np.asarray(self.host * efficiencies.host_s * slowdown)
        return result

    def total_s(self, efficiencies: Efficiencies, slowdown: Array | float = 1.0) -> Array:
        """Return the seconds of all classes and the host."""
        return np.asarray(sum(self.seconds(efficiencies, slowdown).values()))

    def only(self, names: Collection[str]) -> Operations:
        """Return the operations of some classes, without what the host adds."""
        return Operations(
            {name: array for name, array in self.count.items() if name in names},
            {name: array for name, array in self.work_s.items() if name in names},
        )

    def without(self, names: Collection[str]) -> Operations:
        """Return the operations of all other classes, and what the host adds."""
        rest = self.only([name for name in CLASSES if name not in names])
        return Operations(rest.count, rest.work_s, self.host)

    def pick(self, index: int) -> Operations:
        """Return the operations of one option, as scalars."""

        def at(array: Array | float) -> Array:
            array = np.asarray(array)
            return array.reshape(-1)[index if array.size > 1 else 0]

        return Operations(
            {name: at(array) for name, array in self.count.items()},
            {name: at(array) for name, array in self.work_s.items()},
            at(self.host),
        )


def add_operations(*parts: Operations) -> Operations:
    """Return operations that follow each other as one."""
    count: dict[str, Array] = {}
    work_s: dict[str, Array] = {}
    host: Array | float = 0.0
    for part in parts:
        for name, array in part.count.items():
            count[name] = count[name] + array if name in count else array
        for name, array in part.work_s.items():
            work_s[name] = work_s[name] + array if name in work_s else array
        host = host + part.host
    return Operations(count, work_s, host)
