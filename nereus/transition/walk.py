"""Runs through a graph in any order that its edges allow, and checks at every point what must always hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nereus.emu import Emu, emus_of
from nereus.transition.local import GENERATION, TRAINING
from nereus.transition.primitives import Primitive, TransitionGraph

# Picks the next of what may start and what may end: (those that may start, those under way) -> (is a start, which).
Choose = Callable[[Sequence[Primitive], Sequence[Primitive]], tuple[bool, Primitive]]


def check_graph(graph: TransitionGraph) -> None:
    """Raise AssertionError where a graph breaks a promise: in its serial order, or in the two most extreme ones.

    The promises: ids are unique; edges point back in the serial order (so there is no cycle); on every device the
    memory stays under the cap at every point; each model-stage's state is at every point whole in a live unit, in a
    conversion in place, or committed; all units read are live; in the end exactly the target's units are.
    """
    seen: set[str] = set()
    for primitive in graph.primitives:
        assert primitive.id not in seen, f"{primitive.id} is there twice"
        edges = {*primitive.depends_on, *primitive.streams}
        assert primitive.after_commit or edges <= seen, f"{primitive.id} depends on {edges - seen}, which come later"
        assert set(primitive.resource_edges) <= set(primitive.depends_on), primitive.id
        seen.add(primitive.id)
    walk(graph, lambda ready, running: (False, running[0]) if running else (True, ready[0]))
    # As much as possible under way at once, and what gives memory back ends last, or first.
    walk(graph, lambda ready, running: (True, ready[0]) if ready else (False, max(running, key=_held)))
    walk(graph, lambda ready, running: (True, ready[-1]) if ready else (False, min(running, key=_held)))


def _held(primitive: Primitive) -> int:
    return sum(held for _, held in primitive.memory.values())


def walk(graph: TransitionGraph, choose: Choose) -> list[str]:
    """Run through what comes before the commit in the order that `choose` picks; return the ids as they ended.

    Raises:
        AssertionError: a promise of `check_graph` is broken, or nothing can go on.
    """
    state = _State(graph)
    while state.waiting or state.running:
        ending = state.running_now()
        assert state.ready or ending, f"nothing goes on: {list(state.waiting)} wait"
        is_start, primitive = choose(list(state.ready.values()), ending)
        if is_start:
            state.start(primitive)
        else:
            state.end(primitive)
    state.check_target()
    return state.ended


class _State:
    """What is live and what is held at one point of an execution."""

    def __init__(self, graph: TransitionGraph) -> None:
        self.graph = graph
        self.waiting = {p.id: p for p in graph.primitives if not p.after_commit}
        self.running: dict[str, Primitive] = {}
        self.ended: list[str] = []
        self._done: set[str] = set()
        self._free = dict(graph.free_bytes)
        live = emus_of(graph.current) if graph.live is None else graph.live
        self._live = {_key(unit) for unit in live if graph.lost.isdisjoint(unit.devices)}
        self._committed = set(graph.recoverable)
        self._left = {p.id: len(p.depends_on) + len(p.streams) for p in self.waiting.values()}
        self.ready = {p.id: p for p in self.waiting.values() if not self._left[p.id]}
        self._behind: dict[str, list[Primitive]] = {}
        for primitive in self.waiting.values():
            for id in (*primitive.depends_on, *primitive.streams):
                self._behind.setdefault(id, []).append(primitive)
        for name in graph.target:
            self._check_state(name)

    def running_now(self) -> list[Primitive]:
        """Return those under way that may end: what streams from a stage ends after it."""
        return [primitive for primitive in self.running.values() if self._done.issuperset(primitive.streams)]

    def _release(self, primitive: Primitive, *, has_ended: bool) -> None:
        """Count those that may start because a primitive has started, or has ended."""
        for other in self._behind.get(primitive.id, ()):
            if (primitive.id in other.streams) != has_ended:
                self._left[other.id] -= 1
                if not self._left[other.id]:
                    self.ready[other.id] = other

    def start(self, primitive: Primitive) -> None:
        is_filled = bool(primitive.reads) or primitive.kind in ("restore", "destroy")
        assert is_filled, f"{primitive.id} reads nothing"
        for unit in primitive.reads:
            assert _key(unit) in self._live, f"{primitive.id} reads {unit}, which isn't live"
        self.running[primitive.id] = self.waiting.pop(primitive.id)
        del self.ready[primitive.id]
        self._release(primitive, has_ended=False)
        for device, (peak, _) in primitive.memory.items():
            self._free[device] -= peak
            over = -self._free[device]
            assert peak <= 0 or over <= 0, f"{primitive.id} goes {over} bytes over the cap of device {device}"
        self._live.difference_update(_key(unit) for unit in primitive.frees)
        self._check_state(primitive.model_stage)

    def end(self, primitive: Primitive) -> None:
        del self.running[primitive.id]
        self._done.add(primitive.id)
        self._release(primitive, has_ended=True)
        self.ended.append(primitive.id)
        for device, (peak, held) in primitive.memory.items():
            self._free[device] += peak - held
        self._live.update(_key(unit) for unit in primitive.makes)
        if primitive.kind == "stage":
            self._committed.add(primitive.model_stage)
        self._check_state(primitive.model_stage)

    def _check_state(self, name: str) -> None:
        if name in self._committed or (name == GENERATION and TRAINING in self.graph.target):
            return
        converting = any(p.model_stage == name and p.in_place for p in self.running.values())
        assert converting or any(key[0] == name for key in self._live), f"{name} has no copy, live or committed"

    def check_target(self) -> None:
        """Check that freeing what was kept leaves exactly the target's units, and that the memory adds up."""
        for primitive in self.graph.primitives:
            if primitive.after_commit:
                assert primitive.kind == "destroy", primitive.id
                for unit in primitive.frees:
                    assert _key(unit) in self._live, f"{primitive.id} frees {unit}, which isn't live"
                    self._live.remove(_key(unit))
                for device, (_, held) in primitive.memory.items():
                    self._free[device] -= held
        wanted = {_key(unit) for unit in emus_of(self.graph.target)}
        assert self._live == wanted, f"ends with {self._live - wanted} too much and without {wanted - self._live}"


def _key(unit: Emu) -> tuple[str, object, tuple[int, ...]]:
    return unit.model_stage, unit.layout, unit.devices
