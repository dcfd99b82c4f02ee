"""The two model-stages of a stage together: one after the other on one block, or side by side on two."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.planner.fit import Place
from nereus.planner.setting import Floats
from nereus.planner.space import EVERY_DEGREE_UP_TO, Ints
from nereus.planner.tables import StageTable


@dataclass(frozen=True)
class Pairs:
    """Pairs of options, arrays [n] of row indices. `side`: the second block begins where the first one ends.

    Else both begin at the first device and the model-stages run one after the other.
    """

    first_table: StageTable
    second_table: StageTable
    first: Ints
    second: Ints
    side: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.first)

    def take(self, index: Ints) -> Pairs:
        return Pairs(self.first_table, self.second_table, self.first[index], self.second[index], self.side[index])

    @cached_property
    def resident(self) -> Ints:
        """Bytes that stay on the first device."""
        second = np.where(self.side, 0, self.second_table.resident[self.second])
        return self.first_table.resident[self.first] + second

    @cached_property
    def first_devices(self) -> Ints:
        return self.first_table.rows.devices[self.first]

    @cached_property
    def second_devices(self) -> Ints:
        return self.second_table.rows.devices[self.second]

    @cached_property
    def second_start(self) -> Ints:
        return np.where(self.side, self.first_devices, 0)

    @cached_property
    def num_devices(self) -> Ints:
        """Devices from the first one on that the pair uses."""
        return np.maximum(self.first_devices, self.second_start + self.second_devices)

    def first_s(self, phase: str, level: Ints) -> Floats:
        """Return seconds of the first ones at levels of room [n, ...] on the first device."""
        return self.first_table.seconds[phase][_along(self.first, level), level]

    def second_s(self, phase: str, level: Ints) -> Floats:
        """Return seconds of the second ones; those beside the first ones have a room of their own."""
        table, index = self.second_table, _along(self.second, level)
        serial = table.seconds[phase][index, level]
        return np.where(_along(self.side, level), table.anywhere[phase][index], serial)

    def late_s(self, level: Ints) -> Floats:
        """Return the seconds of training: the sum, or the longer one of two side by side."""
        first, second = self.first_s("training", level), self.second_s("training", level)
        return np.where(_along(self.side, level), np.maximum(first, second), first + second)

    def early_s(self, level: Ints) -> Floats:
        """Return the seconds of the training model-stages' inference on the first device."""
        first, second = self.first_s("inference", level), self.second_s("inference", level)
        return first + np.where(_along(self.side, level), 0.0, second)

    def places(self, index: int) -> dict[str, Place]:
        """Return where the model-stages of one pair lie."""
        result = {}
        starts = ((self.first_table, self.first, 0), (self.second_table, self.second, int(self.second_start[index])))
        for table, rows, start in starts:
            if table.name:
                row = int(rows[index])
                layout = table.rows.layouts[int(table.rows.layout[row])]
                positions = start + np.arange(int(table.rows.devices[row]))
                result[table.name] = Place(layout, int(table.rows.dp[row]), positions)
        return result


def _along(index: NDArray, level: Ints) -> NDArray:
    """Return `index` [n] with the dimensions of `level` [n, ...] or [1, ...]."""
    return index.reshape(index.shape + (1,) * (level.ndim - 1))


def build_pairs(first: StageTable, second: StageTable, num_devices: int) -> Pairs:
    """Return the pairs of two model-stages on some devices.

    On up to 16 devices these are all. On more, of those one after the other only the fastest of each layout, and of
    those side by side for each first one the largest second ones of each layout that leave no device idle.
    """
    one, two = (np.array(grid).reshape(-1) for grid in np.mgrid[0 : len(first), 0 : len(second)])
    if num_devices > EVERY_DEGREE_UP_TO:
        both = np.isin(one, _fastest(first)) & np.isin(two, _fastest(second))
        one, two = one[both], two[both]
    serial = Pairs(first, second, one, two, np.zeros(len(one), bool))
    if not first.name or not second.name:
        return serial
    one, two = _side_by_side(first, second, num_devices)
    return Pairs(
        first,
        second,
        np.concatenate([serial.first, one]),
        np.concatenate([serial.second, two]),
        np.concatenate([serial.side, np.ones(len(one), bool)]),
    )


def _fastest(table: StageTable) -> Ints:
    """Return for each layout the row that is fastest with all the room there is."""
    seconds = np.sum(list(table.anywhere.values()), axis=0)
    order = np.lexsort((seconds, table.rows.layout))
    return order[np.unique(table.rows.layout[order], return_index=True)[1]]


def _side_by_side(first: StageTable, second: StageTable, num_devices: int) -> tuple[Ints, Ints]:
    if num_devices <= EVERY_DEGREE_UP_TO:
        fits = first.rows.devices[:, None] + second.rows.devices <= num_devices
        one, two = np.nonzero(fits)
        return one, two
    left = num_devices - first.rows.devices
    one_parts, two_parts = [], []
    for layout in range(len(second.rows.layouts)):
        rows = np.flatnonzero(second.rows.layout == layout)  # dp, so devices, ascending
        at = np.searchsorted(second.rows.devices[rows], left, side="right") - 1
        some = np.flatnonzero(at >= 0)
        one_parts.append(some)
        two_parts.append(rows[at[some]])
    return np.concatenate(one_parts), np.concatenate(two_parts)
