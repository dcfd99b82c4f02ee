"""The two model-stages of a stage together: one after the other on one block, or side by side on two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from nereus.planner.place import Place
from nereus.planner.setting import Floats
from nereus.planner.space import EVERY_DEGREE_UP_TO, Ints, Rows
from nereus.planner.tables import StageTable

# From two tables and the number of devices to rows of the first and second that may lie side by side.
Beside = Callable[[StageTable, StageTable, int], tuple[Ints, Ints]]
# Splits of the devices between two model-stages side by side that are tried for each two layouts in inference.
_SPLITS = 3
# Layouts are compared at one level of room in so many.
_EVERY = 8


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
    def second_resident(self) -> Ints:
        """Bytes that stay of the second one on its first device."""
        return self.second_table.resident[self.second]

    @cached_property
    def first_devices(self) -> Ints:
        return self.first_table.rows.devices[self.first]

    @cached_property
    def second_start(self) -> Ints:
        return np.where(self.side, self.first_devices, 0)

    @cached_property
    def second_end(self) -> Ints:
        return self.second_start + self.second_table.rows.devices[self.second]

    @cached_property
    def num_devices(self) -> Ints:
        """Devices from the first one on that the pair uses."""
        return np.maximum(self.first_devices, self.second_end)

    def resident_at(self, position: Ints) -> Ints:
        """Return the least bytes that stay of a pair on the device at a position; pairs and positions broadcast."""
        first = np.where(position < self.first_devices, self.first_table.resident_low[self.first], 0)
        covers = (position >= self.second_start) & (position < self.second_end)
        return first + np.where(covers, self.second_table.resident_low[self.second], 0)

    def first_s(self, phase: str, level: Ints) -> Floats:
        """Return seconds of the first ones at levels of room on the first device; they broadcast."""
        return self.first_table.seconds[phase][self.first, level]

    def second_s(self, phase: str, level: Ints, second_level: Ints) -> Floats:
        """Return seconds of the second ones; those beside the first ones have the room of `second_level`."""
        table = self.second_table
        serial = table.seconds[phase][self.second, level]
        return np.where(self.side, table.anywhere[phase][self.second, second_level], serial)

    def serial_s(self, phase: str, level: Ints) -> Floats:
        """Return the seconds on the first device: of both where they run one after the other, else of the first."""
        second = self.second_table.seconds[phase][self.second, level]
        return self.first_s(phase, level) + np.where(self.side, 0.0, second)

    def late_s(self, level: Ints, second_level: Ints) -> Floats:
        """Return the seconds of training: the sum, or the longer one of two side by side."""
        first, second = self.first_s("training", level), self.second_s("training", level, second_level)
        return np.where(self.side, np.maximum(first, second), first + second)

    @cached_property
    def along_rows(self) -> Pairs:
        """The same pairs as a column [n, 1]: what they are asked for is then [n, m]."""
        return Pairs(self.first_table, self.second_table, self.first[:, None], self.second[:, None], self.side[:, None])

    def places(self, index: int) -> dict[str, Place]:
        """Return where the model-stages of one pair lie."""
        result = {}
        starts = ((self.first_table, self.first, 0), (self.second_table, self.second, int(self.second_start[index])))
        for table, rows, start in starts:
            if table.name:
                result[table.name] = place_row(table, int(rows[index]), start)
        return result


def place_row(table: StageTable, row: int, start: int) -> Place:
    """Return where a row of a table lies when its block begins at a position."""
    rows = table.rows
    return Place.block(rows.layouts[int(rows.layout[row])], int(rows.dp[row]), start)


def training_pairs(first: StageTable, second: StageTable, num_devices: int) -> Pairs:
    """Return the pairs of two training model-stages on some devices.

    On up to 16 devices these are all. On more, of those one after the other only the fastest of each layout, and of
    those side by side for each first one the largest second ones of each layout that leave no device idle.
    """
    beside = _all_beside if num_devices <= EVERY_DEGREE_UP_TO else _beside_without_idle_devices
    return _pairs(first, second, num_devices, beside)


def inference_pairs(first: StageTable, second: StageTable, num_devices: int) -> Pairs:
    """Return the pairs of two inference model-stages on some devices.

    On up to 16 devices these are all. On more, layouts that need more memory and are no faster than another one are
    left out; of those one after the other only the fastest of each layout is kept, and of those side by side for each
    two layouts only the splits of the devices at which both take about as long.
    """
    beside = _all_beside if num_devices <= EVERY_DEGREE_UP_TO else _beside_in_balance
    return _pairs(first, second, num_devices, beside)


def _pairs(first: StageTable, second: StageTable, num_devices: int, beside: Beside) -> Pairs:
    one, two = np.arange(len(first)), np.arange(len(second))
    if num_devices > EVERY_DEGREE_UP_TO:
        one, two = _fastest(first), _fastest(second)
    one, two = np.repeat(one, len(two)), np.tile(two, len(one))
    side = np.zeros(len(one), bool)
    if first.name and second.name:
        more = beside(first, second, num_devices)
        one, two = np.concatenate([one, more[0]]), np.concatenate([two, more[1]])
        side = np.concatenate([side, np.ones(len(more[0]), bool)])
    return Pairs(first, second, one, two, side)


def _with_most_room(table: StageTable) -> Floats:
    """Return the seconds of each row in all its phases with all the room that a device has."""
    return table.seconds["both" if "both" in table.seconds else "inference"][:, -2]


def _fastest(table: StageTable) -> Ints:
    """Return for each layout that isn't worse in everything the row that is fastest with all the room there is."""
    order = np.lexsort((_with_most_room(table), table.rows.layout))
    rows = order[np.unique(table.rows.layout[order], return_index=True)[1]]
    resident = table.resident[rows]
    leaner = resident[:, None] <= resident
    for each in table.seconds.values():
        seconds = each[rows, :-1:_EVERY]
        leaner &= (seconds[:, None] <= seconds).all(axis=2)
    # Of two that are equal the first one stays.
    leaner &= ~(leaner.T & (np.arange(len(rows))[:, None] >= np.arange(len(rows))))
    np.fill_diagonal(leaner, False)
    return rows[~leaner.any(axis=0)]


def _all_beside(first: StageTable, second: StageTable, num_devices: int) -> tuple[Ints, Ints]:
    one, two = np.nonzero(first.rows.devices[:, None] + second.rows.devices <= num_devices)
    return one, two


def _beside_without_idle_devices(first: StageTable, second: StageTable, num_devices: int) -> tuple[Ints, Ints]:
    return _filled(first.rows, second.rows, num_devices)


@lru_cache(maxsize=64)
def _filled(first: Rows, second: Rows, num_devices: int) -> tuple[Ints, Ints]:
    """Return for each first row the second rows, one a layout, that take most of the devices left."""
    left = num_devices - first.devices
    parts = []
    for layout in range(len(second.layouts)):
        rows = np.flatnonzero(second.layout == layout)  # dp, so devices, ascending
        at = np.searchsorted(second.devices[rows], left, side="right") - 1
        some = np.flatnonzero(at >= 0)
        parts.append((some, rows[at[some]]))
    return np.concatenate([one for one, _ in parts]), np.concatenate([two for _, two in parts])


def _beside_in_balance(first: StageTable, second: StageTable, num_devices: int) -> tuple[Ints, Ints]:
    one, two = _beside_without_idle_devices(first, second, num_devices)
    good = [np.isin(table.rows.layout, table.rows.layout[_fastest(table)]) for table in (first, second)]
    both = good[0][one] & good[1][two]
    one, two = one[both], two[both]
    longer = np.maximum(_with_most_room(first)[one], _with_most_room(second)[two])
    layouts = first.rows.layout[one] * len(second.rows.layouts) + second.rows.layout[two]
    order = np.lexsort((longer, layouts))
    begins = np.unique(layouts[order], return_index=True)[1]
    rank = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    kept = order[rank < _SPLITS]
    return one[kept], two[kept]
