"""A feasible serial order of primitives, found greedily: what fits is made; else something is freed first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from nereus.layout import Layout
from nereus.plan import stage_of
from nereus.transition.assign import NodeOf
from nereus.transition.dead_end import DeadEnd, find_dead_end
from nereus.transition.draft import Draft
from nereus.transition.drafting import Drafting, Found
from nereus.transition.local import GENERATION, TRAINING, StageChange, closure
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Reservation
from nereus.transition.sources import Source, Sources, one_part
from nereus.transition.stage_state import StageState


class SerialOrder:
    """Builds the primitives that run before the commit. A dead end raises: nothing is undone."""

    def __init__(
        self,
        changes: Collection[StageChange],
        memory: TransitionMemory,
        free_bytes: Mapping[int, int],
        *,
        staged: Collection[str],
        recoverable: Collection[str],
        node_of: NodeOf,
        lost: Collection[int] = (),
        part_of: Callable[[int], int] = one_part,
    ) -> None:
        """Prepare.

        Args:
            free_bytes: by device, at the start.
            staged: model-stages whose new units are filled from storage.
            recoverable: model-stages whose state storage, or a source, already has.
            lost: devices whose memory is gone.
            part_of: by device; nothing is copied from one part to another.
        """
        self.drafts: list[Draft] = []
        self._free = dict(free_bytes)
        self._memory, self._recoverable, self._lost = memory, recoverable, lost
        self._dead: dict[tuple[str, tuple[int, ...]], str] = {}  # units that lost a device: what frees the rest of them
        names = {change.model_stage for change in changes}
        self.stages = {
            change.model_stage: StageState.open(
                change,
                memory,
                Sources(node_of, part_of),
                is_staged=change.model_stage in staged,
                is_derived=change.model_stage == GENERATION and TRAINING in names,
            )
            for change in changes
        }
        self._drafting = Drafting(memory, self.stages)

    def run(self, *, release_first: bool) -> None:
        """Make all units of the target.

        Args:
            release_first: before anything else, convert in place what gives memory back on devices that lack it.

        Raises:
            DeadEnd: something can't be made.
        """
        for stage in self.stages.values():
            self._free_dead(stage)
        for stage in self.stages.values():
            self._write(stage)
        if release_first:
            self._release_first()
        left = [(stage, index) for stage in self.stages.values() for index in sorted(stage.pending)]
        while left:
            blocked = [(stage, index) for stage, index in left if not self._place_if_it_fits(stage, index)]
            blocked = [(stage, index) for stage, index in blocked if not self._place_after_releases(stage, index)]
            if len(blocked) == len(left):
                raise find_dead_end(blocked, self.stages, self._free, self._drafting)
            left = blocked

    def _free_dead(self, stage: StageState) -> None:
        """Free what is left of units that lost a device."""
        for unit in stage.change.dead:
            draft = Draft("destroy", stage.name, frees=(unit,))
            for rank, device in enumerate(unit.devices):
                if device not in self._lost:
                    draft.memory[device] = Reservation(0, -stage.held_old[rank])
            self._place(stage, draft)
            self._dead[stage.name, unit.devices] = draft.id

    def _write(self, stage: StageState) -> None:
        """Write what is trained, if storage is to fill units and doesn't have it; generation's state is the actor's."""
        is_wanted = stage.is_staged and bool(stage.pending)
        if stage.name == TRAINING and GENERATION in self.stages:
            generation = self.stages[GENERATION]
            is_wanted = is_wanted or (generation.is_staged and bool(generation.pending))
        if not is_wanted or stage_of(stage.name) != "training" or stage.name in self._recoverable:
            return
        live = stage.change.old + stage.change.kept
        if not live:
            raise DeadEnd(stage.name, -1, 0, 0, frozenset({stage.name}))
        draft = Draft("stage", stage.name, reads=live, transport="staged")
        draft.bytes = int(self._memory.wanted(stage.name, Layout(1, 1))[0])
        self._place(stage, draft)
        stage.writer = draft.id
        for unit in stage.change.old:
            stage.note_reader(unit, draft.id)

    def _place_if_it_fits(self, stage: StageState, index: int) -> bool:
        if index not in stage.pending:
            return True  # was converted together with another
        found = self._drafting.beside(stage, index)
        if found is None:
            return False
        for device, (peak, _) in found[0].memory.items():
            if peak > self._free[device]:
                return False
        self._finish(stage, [index], *found)
        return True

    def _place_after_releases(self, stage: StageState, index: int) -> bool:
        """Make room, whichever does first: free units of no further use, work in place, free any, or own ones there."""
        if index not in stage.pending:
            return True
        beside = self._drafting.beside(stage, index)
        if self._release_for(stage, [index], beside, [], any_units=False):
            return True
        near = [number for number in stage.change.transfers[index].overlaps if number in stage.alive]
        if near and not stage.is_staged and self._place_in_place(stage, index):
            return True
        if self._release_for(stage, [index], beside, []):
            return True
        own = {(stage.name, number) for number in near}
        if not all(stage.outlives(number, own) for number in near):
            return False
        if near and self._release_for(stage, [index], self._drafting.beside(stage, index, near), near):
            return True
        if not stage.is_derived:
            return False
        return self._release_for(stage, [index], self._drafting.beside(stage, index, near, apart=True), near)

    def _place_in_place(self, stage: StageState, index: int) -> bool:
        indexes, numbers = closure(index, stage.change, stage.users, stage.pending, stage.alive)
        if not numbers:
            return False
        return self._release_for(stage, indexes, (self._drafting.in_place(stage, indexes, numbers), None), [])

    def _release_for(
        self, stage: StageState, indexes: list[int], found: Found | None, own: list[int], *, any_units: bool = True
    ) -> bool:
        """Free what a draft lacks, then place it. Returns whether that was possible; if not, nothing has changed.

        Args:
            own: old units of the model-stage that are freed in any case.
            any_units: free also what is still of use: units on whose devices others of their model-stage are to come.
        """
        if found is None:
            return False
        draft = found[0]
        chosen = {(stage.name, number): (stage, number) for number in own}
        gained: dict[int, int] = {}

        def gain(other: StageState, number: int) -> None:
            for device, num_bytes in other.freed_by(number):
                gained[device] = gained.get(device, 0) + num_bytes

        for number in own:
            gain(stage, number)
        protected = {id(unit) for unit in (*draft.reads, *draft.takes_over, *draft.frees)}
        for device, (peak, _) in draft.memory.items():
            while peak > self._free[device] + gained.get(device, 0):
                lack = peak - self._free[device] - gained.get(device, 0)
                best = self._best_release(device, lack, protected, chosen, any_units=any_units)
                if best is None:
                    return False
                chosen[best[0].name, best[1]] = best
                gain(*best)
        for other, number in chosen.values():
            self._place(other, other.destroy(number))
        self._finish(stage, indexes, *found)
        return True

    def _best_release(
        self,
        device: int,
        lack: int,
        protected: Collection[int],
        chosen: Mapping[tuple[str, int], tuple[StageState, int]],
        *,
        any_units: bool,
    ) -> tuple[StageState, int] | None:
        """Return the old unit whose end helps a device best: of no further use, else enough, else small."""
        candidates = []
        for order, stage in enumerate(self.stages.values()):
            number = stage.number_at(device)
            if number is None or (stage.name, number) in chosen or id(stage.change.old[number]) in protected:
                continue
            num_bytes = stage.bytes_at(device)
            if num_bytes and stage.outlives(number, chosen):
                is_useful = any(user in stage.pending for user in stage.users.get(number, ()))
                if is_useful and not any_units:
                    continue
                size = num_bytes if num_bytes >= lack else -num_bytes
                candidates.append(((is_useful, num_bytes < lack, size, order), (stage, number)))
        return min(candidates, key=lambda candidate: candidate[0])[1] if candidates else None

    def _release_first(self) -> None:
        gains: list[tuple[int, int, StageState, int]] = []
        short = self._short_devices()
        for stage in self.stages.values():
            for index in sorted(stage.pending) if not stage.is_staged else ():
                transfer = stage.change.transfers[index]
                gain = sum(count for n in transfer.overlaps for device, count in stage.freed_by(n) if device in short)
                for unit in transfer.makes:
                    gain -= sum(
                        count for device, count in zip(unit.devices, stage.held_new, strict=True) if device in short
                    )
                if transfer.overlaps and gain > 0:
                    gains.append((-gain, len(gains), stage, index))
        for _, _, stage, index in sorted(gains, key=lambda entry: entry[:2]):
            if index in stage.pending:
                self._place_in_place(stage, index)

    def _short_devices(self) -> set[int]:
        """Return the devices that can't hold all old and all new units at once."""
        need: dict[int, int] = {}
        for stage in self.stages.values():
            for index in stage.pending:
                for unit in stage.change.transfers[index].makes:
                    for device, count in zip(unit.devices, stage.held_new, strict=True):
                        need[device] = need.get(device, 0) + count
        return {device for device, count in need.items() if count > self._free[device]}

    def _finish(self, stage: StageState, indexes: list[int], draft: Draft, source: Source | None) -> None:
        """Place a draft that makes the units of some transfers."""
        stage.pending.difference_update(indexes)
        for unit in draft.reads:
            maker = self.stages[unit.model_stage].sources.maker_of(unit)
            if maker:
                draft.depends_on[maker] = None
        for unit in draft.makes:  # the same unit as one that lost a device: its rest goes first
            if (stage.name, unit.devices) in self._dead:
                draft.depends_on[self._dead[stage.name, unit.devices]] = None
        if draft.frees:
            stage.end(draft.frees, draft)
        self._place(stage, draft)
        for unit in (*draft.reads, *draft.takes_over):
            self.stages[unit.model_stage].note_reader(unit, draft.id)
        stage.passed.update(draft.shares)
        stage.made.append(draft.id)
        done = 1
        if source is not None:
            done = self.stages[source.unit.model_stage].sources.use(source, draft.makes[0])
        for unit in draft.makes:
            stage.sources.add(unit, draft.id, done)

    def _place(self, stage: StageState, draft: Draft) -> None:
        draft.id = stage.next_id(draft.kind)
        for device, (_, held) in draft.memory.items():
            self._free[device] -= held
        self.drafts.append(draft)
