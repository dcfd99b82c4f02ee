"""What one primitive needs: whom it reads, and its memory on every device, beside all others or in place."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from nereus.emu import Emu
from nereus.layout import Layout
from nereus.transition.draft import Draft
from nereus.transition.local import TRAINING, Transfer
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Kind, Reservation
from nereus.transition.sources import Source
from nereus.transition.stage_state import StageState

# A draft, with the source that it copies from where there was a choice.
Found = tuple[Draft, Source | None]


class Drafting:
    """Makes drafts from how far the model-stages have come; changes nothing."""

    def __init__(self, memory: TransitionMemory, stages: Mapping[str, StageState]) -> None:
        self._memory, self._stages = memory, stages
        self._fills: dict[tuple[Hashable, ...], tuple[list[Reservation], int, list[int]]] = {}
        self._peaks: dict[tuple[str, int | None, int | None], int] = {}

    def beside(
        self, stage: StageState, index: int, without: Collection[int] = (), *, apart: bool = False
    ) -> Found | None:
        """Return the primitive that makes a transfer's units while all others stay; None where nothing live can.

        Args:
            without: numbers of old units of the model-stage that will be gone.
            apart: read nothing of another model-stage that lies on the same devices: it may have to go.
        """
        transfer = stage.change.transfers[index]
        near = tuple(stage.change.old[n] for n in transfer.overlaps if n in stage.alive and n not in without)
        if stage.is_staged:
            return self._restore(stage, transfer, near), None
        reads, source = near, None
        trained = self._trained_units(transfer) if stage.is_derived else ()
        if trained and not apart and self._lacks(stage, transfer, trained) < self._lacks(stage, transfer, near):
            reads = trained
        if not reads:
            gone = [stage.change.old[number] for number in without]
            source = self._source(stage, transfer, gone, trained if apart else ())
            if source is None:
                return None
            reads = (source.unit,)
        draft = Draft(transfer.kind, stage.name, reads=reads, makes=transfer.makes, transport="direct")
        self._fill(stage, draft)
        if reads is trained:
            self._take_over(stage, draft, near)
        self._add_send_buffers(draft)
        return draft, source

    def in_place(self, stage: StageState, indexes: list[int], numbers: list[int]) -> Draft:
        """Return the primitive that makes the units of some transfers chunk by chunk, while old ones are freed."""
        change = stage.change
        transfers = [change.transfers[index] for index in indexes]
        old, makes = tuple(change.old[n] for n in numbers), tuple(unit for t in transfers for unit in t.makes)
        several: Kind = "move" if change.old_layout == change.new_layout else "reshard"
        kind = transfers[0].kind if len(transfers) == 1 else several
        draft = Draft(kind, stage.name, reads=old, makes=makes, frees=old, transport="direct")
        self._fill(stage, draft)
        new_rank, old_rank = _ranks(makes), _ranks(old)
        for device in {**new_rank, **old_rank}:
            if device in draft.shares:
                continue
            is_freed = device in old_rank and device not in stage.passed
            beside = draft.memory.get(device, Reservation(0, 0))
            held = beside.held - (stage.held_old[old_rank[device]] if is_freed else 0)
            peak = self._in_place_peak(stage, old_rank[device] if is_freed else None, new_rank.get(device))
            draft.memory[device] = Reservation(peak + beside.peak - beside.held, held)
        self._add_send_buffers(draft)
        return draft

    def _restore(self, stage: StageState, transfer: Transfer, near: tuple[Emu, ...]) -> Draft:
        draft = Draft("restore", stage.name, reads=near, makes=transfer.makes, transport="staged")
        writer = self._stages[TRAINING].writer if stage.is_derived else stage.writer
        draft.streams = (writer,) if writer is not None else ()
        self._fill(stage, draft)
        return draft

    def _fill(self, stage: StageState, draft: Draft) -> None:
        """Add to a draft what its new units need on their devices: what they hold, and buffers for what comes."""
        ranks = _ranks(draft.reads)
        first = draft.reads[0] if draft.reads else None
        source = None if first is None else (first.model_stage, first.layout)
        for unit in draft.makes:
            # Units on devices with the same old ranks need the same: on a large cluster they are few kinds.
            old_ranks = tuple(map(ranks.get, unit.devices))
            key = (stage.name, source, draft.kind == "restore", old_ranks)
            if key not in self._fills:
                self._fills[key] = self._fill_of(stage, source, old_ranks, is_restore=draft.kind == "restore")
            reservations, num_bytes, shared = self._fills[key]
            draft.bytes += num_bytes
            draft.memory.update(zip(unit.devices, reservations, strict=True))
            for rank in shared:
                del draft.memory[unit.devices[rank]]
                draft.shares += (unit.devices[rank],)

    def _take_over(self, stage: StageState, draft: Draft, near: tuple[Emu, ...]) -> None:
        """Let new units that are filled from elsewhere still keep the tensors of old ones of their own as they are."""
        if stage.change.old_layout != stage.change.new_layout:
            return
        old_rank, read_rank = _ranks(near), _ranks(draft.reads)
        lacking = self._memory.lacking(stage.name, draft.reads[0].layout, stage.change.new_layout)
        wanted = self._memory.wanted(stage.name, stage.change.new_layout)
        for unit in draft.makes:
            for rank, device in enumerate(unit.devices):
                if old_rank.get(device) == rank:
                    there = read_rank.get(device)
                    draft.bytes -= int(wanted[rank] if there is None else lacking[there, rank])
                    draft.shares += (device,)
                    del draft.memory[device]
        draft.takes_over = tuple(unit for unit in near if not set(draft.shares).isdisjoint(unit.devices))

    def _fill_of(
        self,
        stage: StageState,
        source: tuple[str, Layout] | None,
        old_ranks: tuple[int | None, ...],
        *,
        is_restore: bool,
    ) -> tuple[list[Reservation], int, list[int]]:
        """Return for one new unit, by rank: its reservations; the bytes that it lacks; and the ranks taken over."""
        memory, layout = self._memory, stage.change.new_layout
        most = memory.restore_buffer_bytes if is_restore else memory.transfer_buffer_bytes
        wanted = memory.wanted(stage.name, layout).tolist()
        lacking = memory.lacking(stage.name, source[1], layout).tolist() if source else []
        shared = [rank for rank, old in enumerate(old_ranks) if old == rank and source == (stage.name, layout)]
        counts = [wanted[rank] if old is None else lacking[old][rank] for rank, old in enumerate(old_ranks)]
        reservations = [
            Reservation(held + min(count, most), held) for held, count in zip(stage.held_new, counts, strict=True)
        ]
        return reservations, sum(counts), shared

    def _add_send_buffers(self, draft: Draft) -> None:
        buffer = min(draft.bytes, self._memory.transfer_buffer_bytes)
        for unit in draft.reads if buffer else ():
            for device in unit.devices:
                peak, held = draft.memory.get(device, (0, 0))
                draft.memory[device] = Reservation(peak + buffer, held)

    def _in_place_peak(self, stage: StageState, old_rank: int | None, new_rank: int | None) -> int:
        key = (stage.name, old_rank, new_rank)
        if key not in self._peaks:
            layouts = (stage.change.old_layout, stage.change.new_layout)
            self._peaks[key] = self._memory.in_place_peak(stage.name, layouts, old_rank, new_rank)
        return self._peaks[key]

    def _source(
        self, stage: StageState, transfer: Transfer, without: Collection[Emu], without_trained: Collection[Emu]
    ) -> Source | None:
        source = stage.sources.find(transfer.makes[0], stage.is_live, without)
        if source is None and stage.is_derived:
            training = self._stages[TRAINING]
            source = training.sources.find(transfer.makes[0], training.is_live, without_trained)
        return source

    def _trained_units(self, transfer: Transfer) -> tuple[Emu, ...]:
        """Return the units of actor.training, of those that were there at first, that share devices with a transfer."""
        training = self._stages[TRAINING]
        found = (training.unit_at(device) for unit in transfer.makes for device in unit.devices)
        return tuple({id(unit): unit for unit in found if unit is not None}.values())

    def _lacks(self, stage: StageState, transfer: Transfer, reads: tuple[Emu, ...]) -> int:
        """Return the bytes that would come from elsewhere if some units filled a transfer."""
        draft = Draft(transfer.kind, stage.name, reads=reads, makes=transfer.makes)
        self._fill(stage, draft)
        return draft.bytes


def _ranks(units: Collection[Emu]) -> dict[int, int]:
    """Return by device its rank."""
    return {device: rank for unit in units for rank, device in enumerate(unit.devices)}
