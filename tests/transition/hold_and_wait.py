"""The baseline of the coordination tests: each model-stage plans for itself, and takes its memory device by device.

A local graph knows what is free at the start and what it gives back itself, nothing of the others. Whoever finds too
little waits, and keeps what it has, until enough is given back: which may be never.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from nereus.plan import Plan
from nereus.simulator.clock import Clock
from nereus.transition.graph import InfeasibleTransition, plan_transition
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Primitive, TransitionGraph


def local_primitives(graph: TransitionGraph, memory: TransitionMemory) -> Iterator[Primitive]:
    """Yield the primitives of local graphs that lead to the same target; old units go once nobody reads them."""
    for name in graph.target:
        alone = Plan.of({**dict(graph.current.items()), name: graph.target[name]})
        try:
            local = plan_transition(graph.current, alone, memory)
        except InfeasibleTransition:  # it can't without the others, and waits for them
            enough = dict.fromkeys(memory.usable_bytes, 2**40)
            local = plan_transition(graph.current, alone, replace(memory, usable_bytes=enough))
        made = tuple(p.id for p in local.primitives if p.makes)
        for primitive in local.primitives:
            yield replace(primitive, depends_on=made) if primitive.after_commit else primitive


class HoldAndWait:
    """One execution in virtual time; `stuck` holds the ids that never got their memory."""

    def __init__(self, graph: TransitionGraph, memory: TransitionMemory, rng: random.Random) -> None:
        self.stuck: list[str] = []
        self._clock, self._rng = Clock(), rng
        self._free = dict(graph.free_bytes)
        self._primitives = {p.id: p for p in local_primitives(graph, memory)}
        self._waits = {p.id: {*p.depends_on, *p.streams} for p in self._primitives.values()}
        self._todo: dict[str, list[int]] = {}  # devices whose memory a primitive still lacks, in its order
        self._ended: set[str] = set()

    def run(self) -> bool:
        """Return whether all primitives ended."""
        for id in self._primitives:
            self._start_if_ready(id)
        self._clock.run()
        self.stuck = [id for id in self._primitives if id not in self._ended]
        return not self.stuck

    def _start_if_ready(self, id: str) -> None:
        if id not in self._todo and self._ended.issuperset(self._waits[id]):
            self._todo[id] = sorted(self._primitives[id].memory)
            self._clock.after(self._rng.random(), lambda: self._acquire(id))

    def _acquire(self, id: str) -> None:
        """Take what is free, in the order of the devices; go on when all is there."""
        primitive, todo = self._primitives[id], self._todo[id]
        while todo and (not primitive.memory[todo[0]].peak or primitive.memory[todo[0]].peak <= self._free[todo[0]]):
            self._free[todo[0]] -= primitive.memory[todo[0]].peak
            todo.pop(0)
        if not todo:
            self._clock.after(self._rng.random(), lambda: self._end(primitive))

    def _end(self, primitive: Primitive) -> None:
        self._ended.add(primitive.id)
        for device, (peak, held) in primitive.memory.items():
            self._free[device] += peak - held
        for id in [id for id, todo in self._todo.items() if todo]:
            self._acquire(id)
        for id in self._primitives:
            self._start_if_ready(id)
