"""A worker that notes how much memory each primitive takes at its worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from nereus.plan import StagePlan
from nereus.runtime.rank import Rank
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder
from nereus.runtime.unit_tensors import HeldTensors
from nereus.runtime.worker import WorkerContext
from nereus.staged_state import ShardOrder
from nereus.transition.chunks import Chunk
from nereus.transition.primitives import Primitive


class Peak(NamedTuple):
    """Most bytes above what was held when a primitive started: of tensors and shared memory, and of resident pages."""

    live: int
    resident: int


class WatchedRank(Rank):
    """The real worker, with all that it holds touched before it is measured."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.peaks: dict[str, Peak] = {}

    def begin_trial(
        self,
        seed: int,
        builds: Sequence[BuildOrder],
        sync: tuple[int, StagePlan, StagePlan] | None,
        shards: Sequence[ShardOrder],
    ) -> None:
        """Hold these ranks."""
        self.release()
        self.peaks.clear()
        for order in builds:
            self.build(order)
        if sync is not None:
            self.connect_sync(*sync)
        for held in self.held.pool.values():
            for tensors in held.tensors.values():
                for tensor in tensors.values():
                    with torch.no_grad():
                        tensor.fill_(1.0)
        self.hold_shards(shards)

    def run_primitive(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        alive = weakref.WeakSet[HeldTensors](self.held.pool.values())
        make, free, live = HeldTensors.make, HeldTensors.free, list[int]()

        def note() -> None:
            shared = _shared_bytes()
            live.append(
                shared + sum(t.nbytes for held in alive for part in held.tensors.values() for t in part.values())
            )

        def make_and_note(held: HeldTensors, chunk: Chunk | None = None) -> None:
            make(held, chunk)
            alive.add(held)
            note()

        def note_and_free(held: HeldTensors, chunk: Chunk | None = None) -> None:
            note()  # messages have come meanwhile
            free(held, chunk)

        note()
        self.context.reset_peak_memory()
        before = self.context.peak_memory_bytes()
        HeldTensors.make, HeldTensors.free = make_and_note, note_and_free  # type: ignore[method-assign]
        try:
            received = super().run_primitive(primitive, restore)
        finally:
            HeldTensors.make, HeldTensors.free = make, free  # type: ignore[method-assign]
        self.peaks[primitive.id] = Peak(max(live) - live[0], self.context.peak_memory_bytes() - before)
        return received

    def take_peaks(self) -> dict[str, Peak]:
        """Return what each primitive took."""
        return self.peaks


def _shared_bytes() -> int:
    """Return the resident bytes of shared memory, those of messages."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line for line in status.splitlines() if line.startswith("RssShmem")).split()[1])


class HoardingRank(WatchedRank):
    """Frees what a conversion replaces only when all of it is done: what must not happen."""

    def run_primitive(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        free, late = HeldTensors.free, list[Callable[[], None]]()
        HeldTensors.free = lambda held, chunk=None: late.append(lambda: free(held, chunk))  # type: ignore[method-assign]
        try:
            return super().run_primitive(primitive, restore)
        finally:
            HeldTensors.free = free  # type: ignore[method-assign]
            for free_now in late:
                free_now()
