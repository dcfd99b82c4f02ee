"""The way back: what has been done of a transition that failed, undone in the opposite order.

Units that were made are freed, and units that were freed early are made again from what lives or from storage. At every
point of the way back no more is held than at the same point of the way there.
"""

from __future__ import annotations

from collections.abc import Collection

from nereus.emu import Emu, emus_of
from nereus.transition.draft import Draft
from nereus.transition.graph import InfeasibleTransition
from nereus.transition.local import GENERATION, TRAINING
from nereus.transition.memory import TransitionMemory, format_bytes
from nereus.transition.primitives import Kind, Primitive, Reservation, TransitionGraph
from nereus.transition.resource_edges import find_resource_edges


def plan_undo(
    graph: TransitionGraph, done: Collection[str], memory: TransitionMemory, failed: Collection[str] = ()
) -> TransitionGraph:
    """Return the graph that leads from the middle of a transition back to its old plan.

    Args:
        done: ids of the primitives that have ended.
        failed: ids of those that were under way; what they were making is dropped already.

    Raises:
        InfeasibleTransition: some state is gone, or buffers don't fit on the way; the last commit is left then.
    """
    for id in failed:
        if graph.by_id[id].in_place:
            raise InfeasibleTransition(
                f"{graph.by_id[id].model_stage} was being converted in place, and is half old and half new; "
                "go back to the last commit."
            )
    ended = [p for p in graph.primitives if p.id in done and not p.after_commit]
    back = _WayBack(graph, ended, memory)
    live = tuple(back.live)
    for primitive in reversed(ended):
        back.undo(primitive)
    edges = find_resource_edges(back.drafts, back.free_at_start)
    return TransitionGraph(
        current=graph.target,
        target=graph.current,
        primitives=tuple(draft.final(edges.get(draft.id, ())) for draft in back.drafts),
        kept=tuple(unit for unit in emus_of(graph.current) if unit in live),
        free_bytes=back.free_at_start,
        recoverable=back.stored,
        live=live,
    )


class _WayBack:
    """The units that live while primitives are undone one after the other."""

    def __init__(self, graph: TransitionGraph, ended: Collection[Primitive], memory: TransitionMemory) -> None:
        self.drafts: list[Draft] = []
        self._memory = memory
        self._maker: dict[Emu, str] = {}
        self._readers: dict[Emu, list[str]] = {}
        self._names = set(graph.target)
        self.live = dict.fromkeys(emus_of(graph.current))
        free = dict(graph.free_bytes)
        for primitive in ended:
            for unit in (*primitive.frees, *primitive.makes):
                self.live.pop(unit, None)
            self.live.update(dict.fromkeys(primitive.makes))
            for device, (_, held) in primitive.memory.items():
                free[device] -= held
        self.free_at_start, self._free = free, dict(free)
        staged = {primitive.model_stage for primitive in ended if primitive.kind == "stage"}
        self.stored = graph.recoverable | staged

    def undo(self, primitive: Primitive) -> None:
        if primitive.in_place:
            self._convert_back(primitive)
            return
        for unit in primitive.frees:
            self._make_again(unit)
        if primitive.makes:
            self._free_made(primitive)

    def _free_made(self, primitive: Primitive) -> None:
        """Free units of the target; tensors that were taken over are the old unit's again."""
        draft = Draft("destroy", primitive.model_stage, frees=primitive.makes)
        for unit in primitive.makes:
            held = self._memory.held(unit.model_stage, unit.layout)
            for rank, device in enumerate(unit.devices):
                if device not in primitive.shares:
                    draft.memory[device] = Reservation(0, -held[rank])
        self._end(draft)
        self._place(draft)

    def _make_again(self, unit: Emu) -> None:
        reads = self._reads(unit)
        if not reads and not self._is_stored(unit.model_stage):
            raise InfeasibleTransition(
                f"no unit of {unit.model_stage} is left to make {unit.id} again; go back to the last commit."
            )
        draft = Draft(_kind(unit, reads), unit.model_stage, reads=reads, makes=(unit,))
        draft.transport = "direct" if reads else "staged"
        self._fill(draft)
        self._add_send_buffers(draft)
        self._place(draft)

    def _convert_back(self, primitive: Primitive) -> None:
        name, old, new = primitive.model_stage, primitive.frees, primitive.makes
        draft = Draft(primitive.kind, name, reads=new, makes=old, frees=new, transport="direct")
        self._fill(draft)
        layouts = (new[0].layout, old[0].layout)
        rank_then, rank_now = _ranks(old), _ranks(new)
        for device in {**rank_then, **rank_now}:
            if device in draft.shares:
                continue
            before, after = rank_now.get(device), rank_then.get(device)
            beside = draft.memory.get(device, Reservation(0, 0))
            freed = self._memory.held(name, layouts[0])[before] if before is not None else 0
            peak = self._memory.in_place_peak(name, layouts, before, after)
            draft.memory[device] = Reservation(peak + beside.peak - beside.held, beside.held - freed)
        self._add_send_buffers(draft)
        self._end(draft)
        self._place(draft)

    def _reads(self, unit: Emu) -> tuple[Emu, ...]:
        """Return live units of one layout to copy from: those on the unit's devices, else any, else trained ones."""
        own = [other for other in self.live if other.model_stage == unit.model_stage]
        near = [other for other in own if not set(other.devices).isdisjoint(unit.devices)]
        if near:
            return tuple(other for other in near if other.layout == near[0].layout)
        if not own and unit.model_stage == GENERATION:
            own = [other for other in self.live if other.model_stage == TRAINING]
        return tuple(own[:1])

    def _is_stored(self, name: str) -> bool:
        return name in self.stored or (name == GENERATION and TRAINING in self.stored)

    def _fill(self, draft: Draft) -> None:
        memory, name, layout = self._memory, draft.model_stage, draft.makes[0].layout
        held, wanted = memory.held(name, layout), memory.wanted(name, layout).tolist()
        ranks = _ranks(draft.reads)
        first = draft.reads[0] if draft.reads else None
        lacking = memory.lacking(name, first.layout, layout).tolist() if first else []
        most = memory.transfer_buffer_bytes if first else memory.restore_buffer_bytes
        for unit in draft.makes:
            for rank, device in enumerate(unit.devices):
                old = ranks.get(device)
                if first and old == rank and (first.model_stage, first.layout) == (name, layout):
                    draft.shares += (device,)
                    continue
                count = wanted[rank] if old is None else lacking[old][rank]
                draft.bytes += count
                draft.memory[device] = Reservation(held[rank] + min(count, most), held[rank])

    def _add_send_buffers(self, draft: Draft) -> None:
        buffer = min(draft.bytes, self._memory.transfer_buffer_bytes)
        for unit in draft.reads if buffer else ():
            for device in unit.devices:
                peak, held = draft.memory.get(device, (0, 0))
                draft.memory[device] = Reservation(peak + buffer, held)

    def _end(self, draft: Draft) -> None:
        for unit in draft.frees:
            draft.depends_on.update(dict.fromkeys(self._readers.get(unit, ())))
            self.live.pop(unit)

    def _place(self, draft: Draft) -> None:
        draft.id = f"{draft.model_stage}/undo-{draft.kind}/{len(self.drafts)}"
        for device, (peak, held) in draft.memory.items():
            if peak and peak > self._free[device]:
                raise InfeasibleTransition(
                    f"on the way back {draft.model_stage} needs {format_bytes(peak)} on device {device}, where "
                    f"{format_bytes(self._free[device])} are free; go back to the last commit."
                )
            self._free[device] -= held
        for unit in draft.reads:
            if unit in self._maker:
                draft.depends_on[self._maker[unit]] = None
            self._readers.setdefault(unit, []).append(draft.id)
        for unit in draft.makes:
            self.live[unit] = None
            self._maker[unit] = draft.id
        self.drafts.append(draft)


def _kind(unit: Emu, reads: tuple[Emu, ...]) -> Kind:
    if not reads:
        return "restore"
    if all(set(other.devices).isdisjoint(unit.devices) or other.role != unit.role for other in reads):
        return "extend"
    return "move" if reads[0].layout == unit.layout else "reshard"


def _ranks(units: Collection[Emu]) -> dict[int, int]:
    return {device: rank for unit in units for rank, device in enumerate(unit.devices)}
