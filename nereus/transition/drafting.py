"""What one primitive needs: whom it reads, and its memory on every device, beside all others or in place."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

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
        self._sending: dict[tuple[Hashable, ...], tuple[dict[int, Reservation], int, tuple[int, ...]]] = {}

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
        if reads is not trained and len(transfer.makes) == 1:
            self._fill_one(stage, draft)
            return draft, source
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
        ranks, source = _ranks(draft.reads), _source_of(draft.reads)
        for unit in draft.makes:
            fill = self._fill_for(stage, source, unit, ranks, is_restore=draft.kind == "restore")
            reservations, num_bytes, shared = fill
            draft.bytes += num_bytes
            draft.memory.update(zip(unit.devices, reservations, strict=True))
            for rank in shared:
                del draft.memory[unit.devices[rank]]
                draft.shares += (unit.devices[rank],)

    def _fill_for(
        self,
        stage: StageState,
        source: tuple[str, Layout] | None,
        unit: Emu,
        ranks: Mapping[int, int],
        *,
        is_restore: bool,
    ) -> tuple[list[Reservation], int, list[int]]:
        """Return `_fill_of` a unit; those on devices with the same old ranks need the same, and they are few kinds."""
        old_ranks = tuple(map(ranks.get, unit.devices))
        key = (stage.name, source, is_restore, old_ranks)
        if key not in self._fills:
            self._fills[key] = self._fill_of(stage, source, old_ranks, is_restore=is_restore)
        return self._fills[key]

    def _fill_one(self, stage: StageState, draft: Draft) -> None:
        """Do `_fill` and `_add_send_buffers` for one new unit; where it only reads on its own devices, as last time."""
        devices, first = draft.makes[0].devices, draft.reads[0]
        ranks = _ranks(draft.reads)
        old_ranks = tuple(map(ranks.get, devices))
        if len(devices) - old_ranks.count(None) != len(ranks):
            self._fill(stage, draft)
            self._add_send_buffers(draft)
            return
        key = (stage.name, first.model_stage, first.layout, old_ranks)
        known = self._sending.get(key)
        if known is None:
            self._fill(stage, draft)
            self._add_send_buffers(draft)
            place = {device: number for number, device in enumerate(devices)}
            memory = {place[device]: reservation for device, reservation in draft.memory.items()}
            self._sending[key] = memory, draft.bytes, tuple(place[device] for device in draft.shares)
            return
        memory, draft.bytes, shares = known
        draft.memory = {devices[number]: reservation for number, reservation in memory.items()}
        draft.shares = tuple(devices[number] for number in shares)

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
        buffer, memory = min(draft.bytes, self._memory.transfer_buffer_bytes), draft.memory
        only_sends = Reservation(buffer, 0)
        for unit in draft.reads if buffer else ():
            for device in unit.devices:
                other = memory.get(device)
                memory[device] = Reservation(other.peak + buffer, other.held) if other else only_sends

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
        ranks, source = _ranks(reads), _source_of(reads)
        return sum(self._fill_for(stage, source, unit, ranks, is_restore=False)[1] for unit in transfer.makes)


def _source_of(reads: Sequence[Emu]) -> tuple[str, Layout] | None:
    return (reads[0].model_stage, reads[0].layout) if reads else None


def _ranks(units: Collection[Emu]) -> dict[int, int]:
    """Return by device its rank."""
    if len(units) == 1:
        (unit,) = units
        return dict(zip(unit.devices, range(len(unit.devices)), strict=True))
    return {device: rank for unit in units for rank, device in enumerate(unit.devices)}
