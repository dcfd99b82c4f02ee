"""From which live unit a new one is copied: the one that is free first, near ones preferred; copies are copied too.

A unit that was copied a moment ago can be copied from as well, so one unit becomes n in about log2(n) rounds.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nereus.emu import Emu
from nereus.transition.assign import NodeOf

# What a copy takes, inside a node and to another one: only their ratio matters, and only for this choice.
_NEAR, _FAR = 1, 4
# A part of the devices, and a node there or any.
_Place = tuple[int, int | None]


def one_part(device: int) -> int:
    """Say of every device that it is in the same part."""
    return 0


@dataclass
class Source:
    """A live unit, the primitive that made it ("": it was there), and when it would be free to send again."""

    unit: Emu
    maker: str
    available: int


class Sources:
    """The live units of one model-stage."""

    def __init__(self, node_of: NodeOf, part_of: Callable[[int], int] = one_part) -> None:
        """Args: part_of: by device; what a unit is copied from is in its part."""
        self._node_of, self._part_of = node_of, part_of
        self._number = itertools.count()
        # By where a unit's first device is: (available, number, source); entries may be stale.
        self._heaps: dict[_Place, list[tuple[int, int, Source]]] = {}
        self._makers: dict[int, str] = {}
        self._units: list[Emu] = []  # keeps them alive, and with them their identity

    def add(self, unit: Emu, maker: str = "", available: int = 0) -> None:
        self._units.append(unit)
        self._makers[id(unit)] = maker
        self._push(Source(unit, maker, available))

    def maker_of(self, unit: Emu) -> str:
        """Return the id of the primitive that made a unit, "" for one that was there before."""
        return self._makers[id(unit)]

    def find(self, target: Emu, is_live: Callable[[Emu], bool], without: Collection[Emu] = ()) -> Source | None:
        """Return the source for a new unit, or None when there is none."""
        near, far = (self._first(place, is_live, without) for place in self._places(target))
        if near is not None and far is not None and near.available + _NEAR <= far.available + _FAR:
            return near
        return far

    def use(self, source: Source, target: Emu) -> int:
        """Let a source send a copy; return when it is done."""
        is_near = self._node_of(source.unit.devices[0]) == self._node_of(target.devices[0])
        source.available += _NEAR if is_near else _FAR
        self._push(source)
        return source.available

    def _push(self, source: Source) -> None:
        entry = (source.available, next(self._number), source)
        for place in self._places(source.unit):
            heapq.heappush(self._heaps.setdefault(place, []), entry)

    def _places(self, unit: Emu) -> tuple[_Place, _Place]:
        device = unit.devices[0]
        part = self._part_of(device)
        return (part, self._node_of(device)), (part, None)

    def _first(self, place: _Place, is_live: Callable[[Emu], bool], without: Collection[Emu]) -> Source | None:
        heap = self._heaps.get(place, [])
        put_back, found = [], None
        while heap and found is None:
            available, _, source = heap[0]
            if available != source.available or not is_live(source.unit):
                heapq.heappop(heap)
            elif source.unit in without:
                put_back.append(heapq.heappop(heap))
            else:
                found = source
        for entry in put_back:
            heapq.heappush(heap, entry)
        return found
