"""The global graph of a transition: from two plans and the memory of the devices to primitives with all their edges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

from nereus.emu import Emu
from nereus.layout import Layout
from nereus.plan import Plan, stage_of
from nereus.transition.assign import NodeOf, assign_devices, one_node
from nereus.transition.critical_path import price_graph
from nereus.transition.dead_end import DeadEnd
from nereus.transition.draft import Draft
from nereus.transition.durations import durations
from nereus.transition.local import GENERATION, StageChange, sides_of, stage_changes
from nereus.transition.memory import TransitionMemory, format_bytes, resident_bytes
from nereus.transition.order import SerialOrder
from nereus.transition.primitives import Primitive, TransitionGraph, TransportChoice
from nereus.transition.resource_edges import find_resource_edges
from nereus.transition.shorten import shorten
from nereus.transition.sources import one_part
from nereus.transition.speeds import Speeds
from nereus.transition.stage_state import StageState
from nereus.transition.stencil import Stencil
from nereus.transition.twins import find_twins, only_on

# Whether the state of this boundary is in storage: not at all, on its way, or committed.
StagedSet = Literal["none", "pending", "committed"]


class InfeasibleTransition(ValueError):
    """No order of primitives stays within the memory of the devices; says on which one, and by how much."""


def plan_transition(
    current: Plan,
    target: Plan,
    memory: TransitionMemory,
    *,
    transport: TransportChoice = "auto",
    staged_set: StagedSet = "none",
    lost: Collection[int] = frozenset(),
    node_of: NodeOf = one_node,
    speeds: Speeds | None = None,
) -> TransitionGraph:
    """Return the graph that leads from one plan to another.

    Args:
        target: a legal plan that fits; its devices may come out in another rank order.
        transport: "auto" moves directly what memory lets it, unless `speeds` say that storage is faster.
        staged_set: whether storage has the state of this boundary; else a staged transport writes it first.
        lost: devices of the current plan whose memory is gone. Those that the target names are there again, empty.
        node_of: devices change places with others of their node only.
        speeds: of links and storage. With them, a small graph is also put into an order that ends sooner.

    Raises:
        InfeasibleTransition: memory lacks during the move ("direct"), or at its end; or state has no live copy.
        ValueError: a plan names a device that `memory` doesn't know.
    """
    check_devices(current, target, memory, lost)
    node_of = {device: node_of(device) for device in {*current.devices, *target.devices}}.__getitem__
    target = assign_devices(current, target, memory, lost, node_of)
    build = _Build(current, target, memory, staged_set, frozenset(lost), node_of)
    everything = frozenset(target)
    if transport == "auto":
        graph = build.escalated(frozenset())
        if speeds is not None and graph.primitives:
            graph = _cheapest(build, graph, lambda option: price_graph(option, memory, speeds))
    else:
        graph = build.graph(everything if transport == "staged" else frozenset())
    return graph if speeds is None else shorten(graph, durations(graph, memory, speeds))


def _cheapest(build: _Build, direct: TransitionGraph, price: Callable[[TransitionGraph], float]) -> TransitionGraph:
    """Return the cheapest of: as much directly as memory lets, all staged, and each model-stage as is faster for it."""
    staged = build.graph(frozenset(direct.target))
    faster = frozenset(name for name in direct.target if price(_only(staged, name)) < price(_only(direct, name)))
    options = [direct, staged]
    if faster and faster < frozenset(direct.target):
        options.append(build.escalated(faster))
    return min(options, key=price)


def check_devices(current: Plan, target: Plan, memory: TransitionMemory, lost: Collection[int]) -> None:
    """Raise ValueError when a plan names a device that isn't there."""
    for plan, what in ((current, "the current plan"), (target, "the new plan")):
        for device in plan.devices:
            if device not in memory.usable_bytes and (plan is target or device not in lost):
                known = ", ".join(map(str, sorted(memory.usable_bytes)))
                raise ValueError(
                    f"{what} names device {device}, but there are only {known}; name devices that are there."
                )


class _Build:
    """One pair of plans, tried with more and more model-stages through storage."""

    def __init__(
        self,
        current: Plan,
        target: Plan,
        memory: TransitionMemory,
        staged_set: StagedSet,
        lost: frozenset[int],
        node_of: NodeOf,
    ) -> None:
        self._current, self._target, self._memory = current, target, memory
        self._is_pending, self._node_of = staged_set == "pending", node_of
        self._lost = lost
        self._sides = sides_of(current, target)
        frozen = {name for name in target if stage_of(name) == "inference"}
        self._recoverable = frozenset(target) if staged_set == "committed" else frozenset(frozen)
        devices = sorted({*current.devices}.difference(lost).union(target.devices))
        held = {**resident_bytes(current, memory, [*devices, *lost]), **dict.fromkeys(lost, 0)}
        self._free = {device: memory.usable_bytes[device] - held[device] for device in devices}
        self._twins = find_twins(self._sides, self._free, node_of, lost)

    @cached_property
    def _changes(self) -> tuple[StageChange, ...]:
        return stage_changes(self._sides, self._lost)

    def graph(self, staged: frozenset[str]) -> TransitionGraph:
        """Return the graph with just these model-stages through storage.

        Raises:
            InfeasibleTransition: there is none.
        """
        try:
            return self._try(staged)
        except DeadEnd as dead_end:
            raise self._infeasible(dead_end, staged) from None

    def escalated(self, staged: frozenset[str]) -> TransitionGraph:
        """Return the graph with these model-stages through storage, and more where memory asks for it."""
        while True:
            try:
                return self._try(staged)
            except DeadEnd as dead_end:
                more = self._next_staged(dead_end, staged)
                if more is None:
                    raise self._infeasible(dead_end, staged) from None
                staged = staged | {more}

    def _try(self, staged: frozenset[str]) -> TransitionGraph:
        if self._twins:
            try:
                return self._of_twins(staged)
            except DeadEnd:
                pass  # what doesn't go part by part may go where parts help each other
        changes = self._changes
        drafts = self._drafts(changes, self._free, staged)
        return self._graph(self._finals(drafts, self._free), (unit for change in changes for unit in change.kept))

    def _of_twins(self, staged: frozenset[str]) -> TransitionGraph:
        """Return the graph in which every part of the devices goes its own way, and twins the same."""
        part_of = {device: number for number, twins in enumerate(self._twins) for device in twins[0].devices}
        free = {device: self._free[device] for device in part_of if device in self._free}
        changes = stage_changes(only_on(self._sides, part_of), self._lost)
        primitives = self._finals(self._drafts(changes, free, staged, part_of.__getitem__), free)
        stencil = Stencil(self._twins)
        kept = (unit for change in changes for unit in stencil.units_on_all(change.kept))
        return self._graph((copy for primitive in primitives for copy in stencil.copies(primitive)), kept)

    def _drafts(
        self,
        changes: Sequence[StageChange],
        free: Mapping[int, int],
        staged: frozenset[str],
        part_of: Callable[[int], int] = one_part,
    ) -> list[Draft]:
        """Return what leads from one side of some changes to the other, in a serial order.

        Raises:
            DeadEnd: no such order was found.
        """
        for release_first in (False, True):
            order = SerialOrder(
                changes,
                self._memory,
                free,
                staged=staged,
                recoverable=self._recoverable,
                node_of=self._node_of,
                lost=self._lost,
                part_of=part_of,
            )
            try:
                order.run(release_first=release_first)
            except DeadEnd:
                if release_first:
                    raise
            else:
                after = (_after_commit(stage) for stage in order.stages.values())
                return [*order.drafts, *(draft for draft in after if draft is not None)]
        raise AssertionError("unreachable")

    def _finals(self, drafts: Sequence[Draft], free: Mapping[int, int]) -> Iterator[Primitive]:
        edges = find_resource_edges([draft for draft in drafts if not draft.after_commit], free)
        for draft in drafts:
            if draft.kind == "stage" and self._is_pending:
                draft.bytes = 0
            yield draft.final(edges.get(draft.id, ()), self._lost)

    def _graph(self, primitives: Iterable[Primitive], kept: Iterable[Emu]) -> TransitionGraph:
        return TransitionGraph(
            current=self._current,
            target=self._target,
            primitives=tuple(primitives),
            kept=tuple(kept),
            free_bytes=self._free,
            recoverable=self._recoverable,
            lost=self._lost,
        )

    def _next_staged(self, dead_end: DeadEnd, staged: frozenset[str]) -> str | None:
        """Return the model-stage that goes through storage next: one in the way, what storage has first, then small."""
        left = [change for change in self._changes if change.model_stage not in staged and change.transfers]
        # What generation holds can be had from training at any time: storage gains nothing.
        left = [change for change in left if change.model_stage != GENERATION or dead_end.device < 0] or left
        in_the_way = [change for change in left if change.model_stage in dead_end.holders] or left

        def written(name: str) -> int:
            return 0 if name in self._recoverable else int(self._memory.wanted(name, Layout())[0])

        return min((change.model_stage for change in in_the_way), key=lambda name: (written(name), name), default=None)

    def _infeasible(self, dead_end: DeadEnd, staged: frozenset[str]) -> InfeasibleTransition:
        name, device = dead_end.model_stage, dead_end.device
        if device < 0:
            return InfeasibleTransition(
                f"no replica of {name} is whole on the devices that are left, and no commit of this boundary holds its "
                "state; resume from the last commit."
            )
        need, free, usable = map(
            format_bytes, (dead_end.need_bytes, dead_end.free_bytes, self._memory.usable_bytes[device])
        )
        numbers = (
            f"making {name} takes {need} on device {device}, where {free} of the {usable} for model-stages can be free "
            "by then"
        )
        if staged >= set(self._target):
            return InfeasibleTransition(f"the new plan doesn't fit: {numbers}; use more tp or pp, or more devices.")
        return InfeasibleTransition(
            f"transport: direct can't carry this transition: {numbers}, since other state must stay live until it is "
            "copied; use transport: auto or staged, or a plan that leaves more room."
        )


def _after_commit(stage: StageState) -> Draft | None:
    """Return the primitive that frees what was kept of a model-stage's old units."""
    left = sorted(stage.alive)
    if not left:
        return None
    draft = Draft("destroy", stage.name, id=stage.next_id("destroy"), after_commit=True)
    draft.frees = tuple(stage.change.old[number] for number in left)
    for number in left:
        draft.memory.update(stage.memory_of_end(number))
    return draft


def _only(graph: TransitionGraph, name: str) -> TransitionGraph:
    """Return what of a graph concerns one model-stage, the writing of what it reads included."""
    mine = [primitive for primitive in graph.primitives if primitive.model_stage == name]
    own = {id for primitive in mine for id in (primitive.id, *primitive.streams)}
    primitives = (
        replace(
            primitive,
            depends_on=tuple(id for id in primitive.depends_on if id in own),
            streams=tuple(id for id in primitive.streams if id in own),
        )
        for primitive in graph.primitives
        if primitive.id in own
    )
    return replace(graph, primitives=tuple(primitives))
