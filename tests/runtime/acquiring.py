"""The baseline of the coordination tests, on real workers: no resource edges, memory is taken device by device.

Each model-stage plans for itself. A primitive takes what it needs of its devices, lowest first; where too little is
free it waits, and keeps what it has. When all of them wait for each other, the transition is stuck.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Primitive, TransitionGraph
from tests.runtime.moving_trials import by_edges
from tests.transition.hold_and_wait import local_primitives


class Stuck(BaseException):
    """Nothing goes on any more. No error of the executor's: nobody goes back from it, and the trial ends."""

    def __init__(self, circle: list[Primitive]) -> None:
        super().__init__(" -> ".join(primitive.id for primitive in circle))
        self.circle = circle


def independent(graph: TransitionGraph, memory: TransitionMemory) -> TransitionGraph:
    """Return the graph in which each model-stage has planned for itself, and no edge stands for memory.

    Edges between model-stages that keep state are there: what is read is freed after it was read, not before.
    """
    found = {p.id: p for p in local_primitives(graph, memory)}  # two may stage the same: once is enough
    primitives = []
    for p in found.values():
        readers = {
            q.id for q in found.values() if q.model_stage != p.model_stage and not {*q.reads}.isdisjoint(p.frees)
        }
        depends_on = ({*p.depends_on} - {*p.resource_edges}) | readers
        primitives.append(replace(p, depends_on=tuple(sorted(depends_on)), resource_edges=(), after_commit=False))
    return replace(graph, primitives=tuple(by_edges(primitives)))


class Acquiring:
    """Runs primitives on real workers once they have their memory; `Stuck` when none ever will."""

    def __init__(self, graph: TransitionGraph, run: Callable[[str], Any]) -> None:
        """Describe an execution.

        Args:
            run: runs a primitive by its id, once it has all its memory.
        """
        self._by_id, self._run = graph.by_id, run
        self._free = dict(graph.free_bytes)
        self._has: dict[str, list[int]] = {}  # devices whose memory a primitive has
        self._waits_for: dict[str, int] = {}  # the device whose memory it waits for
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        self._stuck: Stuck | None = None

    def __call__(self, primitive: Primitive) -> Any:
        """Take the memory, device by device, then run."""
        self._acquire(primitive)
        result = self._run(primitive.id)
        with self._changed:
            self._ended.add(primitive.id)
            for device, (peak, held) in primitive.memory.items():
                self._free[device] += peak - held
            self._look_whether_stuck()
            self._changed.notify_all()
        return result

    def _acquire(self, primitive: Primitive) -> None:
        with self._changed:
            mine = self._has[primitive.id] = []
            for device in sorted(primitive.memory):
                peak = primitive.memory[device].peak
                while peak and peak > self._free[device]:
                    self._waits_for[primitive.id] = device
                    self._look_whether_stuck()
                    if self._stuck is not None:
                        raise self._stuck
                    self._changed.wait()
                self._waits_for.pop(primitive.id, None)
                self._free[device] -= peak
                mine.append(device)

    def _look_whether_stuck(self) -> None:
        """Declare it when all that have begun wait in vain, and nothing else can begin."""
        for id, primitive in self._by_id.items():
            if id in self._ended:
                continue
            device = self._waits_for.get(id)
            if id not in self._has:
                if self._ended.issuperset(primitive.depends_on):
                    return
            elif device is None or primitive.memory[device].peak <= self._free[device]:
                return
        if len(self._ended) < len(self._by_id) and self._stuck is None:
            self._stuck = Stuck(self._find_circle())
            self._changed.notify_all()

    def _find_circle(self) -> list[Primitive]:
        """Return a largest set of primitives each of which waits, by way of others, for all the others and itself."""
        reach = {id: set(self._whom_it_waits_for(id)) for id in self._by_id if id not in self._ended}
        for between in reach:
            for id in reach:
                if between in reach[id]:
                    reach[id] |= reach[between]
        circles = [[other for other in reach if id in reach[other] and other in reach[id]] for id in reach]
        return [
            self._by_id[id] for id in max(circles, key=lambda circle: (self._num_model_stages(circle), len(circle)))
        ]

    def _num_model_stages(self, ids: list[str]) -> int:
        return len({self._by_id[id].model_stage for id in ids})

    def _whom_it_waits_for(self, id: str) -> list[str]:
        """Return what has not ended and must before `id` goes on: edges, or memory on the device it waits for."""
        primitive, device = self._by_id[id], self._waits_for.get(id)
        if device is None:
            return [other for other in primitive.depends_on if other not in self._ended]
        holders = [other for other, has in self._has.items() if device in has and other not in (*self._ended, id)]
        gives = [p.id for p in self._by_id.values() if p.id not in self._ended and device in p.memory]
        return holders + [other for other in gives if other != id and self._by_id[other].memory[device].held < 0]
