"""How far one model-stage has come while the serial order is being built."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from nereus.emu import Emu
from nereus.transition.draft import Draft
from nereus.transition.local import StageChange, users_of
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Reservation
from nereus.transition.sources import Sources


@dataclass
class StageState:
    """One model-stage on its way.

    Attributes:
        is_staged: whether its new units are filled from storage.
        is_derived: whether all it holds can be had from another model-stage.
        alive: numbers of the old units that haven't been freed.
        pending: numbers of the transfers that haven't been placed.
        passed: devices whose old tensors a new unit has taken over.
        made: ids of the primitives that made new units.
        writer: id of the primitive that writes its state to storage, if there is one.
    """

    change: StageChange
    is_staged: bool
    is_derived: bool
    sources: Sources
    held_old: tuple[int, ...]
    held_new: tuple[int, ...]
    passed: set[int] = field(default_factory=set)
    made: list[str] = field(default_factory=list)
    writer: str | None = None
    _readers: dict[int, list[str]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def open(
        cls, change: StageChange, memory: TransitionMemory, sources: Sources, *, is_staged: bool, is_derived: bool
    ) -> StageState:
        held = [memory.held(change.model_stage, layout) for layout in (change.old_layout, change.new_layout)]
        for unit in (*change.kept, *change.old):
            sources.add(unit)
        return cls(change, is_staged, is_derived, sources, held[0], held[1])

    def __post_init__(self) -> None:
        self.alive = set(range(len(self.change.old)))
        self.pending = set(range(len(self.change.transfers)))
        self.users = users_of(self.change)
        self._place_of = {d: (n, rank) for n, unit in enumerate(self.change.old) for rank, d in enumerate(unit.devices)}
        self._kept_at = {device: unit for unit in self.change.kept for device in unit.devices}
        self._numbers = {id(unit): number for number, unit in enumerate(self.change.old)}
        self._freed = [Reservation(0, -num_bytes) for num_bytes in self.held_old]
        self.name = self.change.model_stage

    def number_at(self, device: int) -> int | None:
        """Return the number of the live old unit that has tensors of its own on a device."""
        number = self._place_of.get(device, (-1, -1))[0]
        return number if number in self.alive and device not in self.passed else None

    def unit_at(self, device: int) -> Emu | None:
        """Return the live unit on a device, of those that were there at first."""
        number = self.number_at(device)
        return self._kept_at.get(device) if number is None else self.change.old[number]

    def bytes_at(self, device: int) -> int:
        """Return what the old unit on a device holds there."""
        return self.held_old[self._place_of[device][1]]

    def freed_by(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield (device, bytes) that the end of an old unit frees."""
        for rank, device in enumerate(self.change.old[number].devices):
            if device not in self.passed:
                yield device, self.held_old[rank]

    def memory_of_end(self, number: int) -> dict[int, Reservation]:
        """Return the same as a primitive's memory."""
        memory = dict(zip(self.change.old[number].devices, self._freed, strict=True))
        if self.passed:
            for device in self.passed.intersection(memory):
                del memory[device]
        return memory

    def is_live(self, unit: Emu) -> bool:
        number = self._numbers.get(id(unit))
        return number is None or number in self.alive

    def note_reader(self, unit: Emu, reader: str) -> None:
        """Remember who reads an old unit; others are never freed."""
        number = self._numbers.get(id(unit))
        if number is not None:
            self._readers.setdefault(number, []).append(reader)

    def outlives(self, number: int, chosen: Collection[tuple[str, int]]) -> bool:
        """Return whether all state of the model-stage outlives an old unit, beside others that were chosen."""
        if self.is_staged or self.is_derived or self.change.kept or self.made:
            return True
        return any(other != number and (self.name, other) not in chosen for other in self.alive)

    def end(self, units: Collection[Emu], draft: Draft) -> None:
        """Count old units as freed by a draft, which waits for all that read them, the writer of a staged set included.

        That is enough to keep the state alive: the last of them is freed only where new units were made before, and
        those were copied from old ones (or from the set), which wait for that copy in their turn.
        """
        for unit in units:
            number = self._numbers[id(unit)]
            draft.depends_on.update(dict.fromkeys(self._readers.get(number, ())))
            self.alive.remove(number)

    def destroy(self, number: int) -> Draft:
        """Return the primitive that frees an old unit; it counts as freed from now on."""
        draft = Draft("destroy", self.name, frees=(self.change.old[number],))
        draft.memory = self.memory_of_end(number)
        self.end(draft.frees, draft)
        return draft

    def next_id(self, kind: str) -> str:
        count = self._counts.get(kind, 0)
        self._counts[kind] = count + 1
        return f"{self.name}/{kind}/{count}"
