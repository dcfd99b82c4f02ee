"""A worker's part of a transition: units in a pool are made, filled and freed; links of the new plan wait beside."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from nereus.emu import Emu
from nereus.layout import Copy
from nereus.limits import RESTORE_BUFFER_BYTES, SYNC_BUCKET_BYTES
from nereus.model.spec import ModelSpec, tensors
from nereus.plan import stage_of
from nereus.runtime.communicator import Communicator, CommunicatorAborted
from nereus.runtime.links import Links, connect_links
from nereus.runtime.rank_state import Counters
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder, TransitionOrder, UnitKey
from nereus.runtime.unit_tensors import HeldTensors, prefixed
from nereus.runtime.weight_sync import WeightSync
from nereus.transition.chunks import Chunk, chunk_order
from nereus.transition.copies import copies_of, restoration_of
from nereus.transition.primitives import TRANSFER_BUFFER_BYTES, Primitive
from storage.manifest import ShardRecord
from storage.state_reader import StateReader

if TYPE_CHECKING:
    from nereus.runtime.rank import Rank

_POLL_S = 0.2
_FEED_LIMIT_S = 600.0
_Fed = tuple[ShardRecord | None, str | None]


@dataclass(frozen=True)
class _Dissolved:
    """A unit in force whose tensors are being taken apart: what forms it again over the same tensors."""

    replica: int
    links: Links
    key: UnitKey
    counters: Counters
    policy_version: int | None


@dataclass
class _UnderWay:
    epoch: int
    before: set[UnitKey]
    builds: dict[str, BuildOrder] = field(default_factory=dict)
    links: dict[str, tuple[int, Links]] = field(default_factory=dict)
    sync: tuple[WeightSync, Communicator] | None = None
    transfer: Communicator | None = None
    devices: tuple[int, ...] = ()
    dissolved: dict[str, _Dissolved] = field(default_factory=dict)
    replaced: list[Links] = field(default_factory=list)


class RankTransition:
    """The units that this device holds beside those in force, and the attempt under way."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._context = rank, rank.context
        self.pool: dict[UnitKey, HeldTensors] = {}
        self._now: _UnderWay | None = None
        self._feeds: dict[str, queue.SimpleQueue[_Fed]] = defaultdict(queue.SimpleQueue)

    # Connecting

    def begin(self, order: TransitionOrder) -> None:
        """Connect the new plan's links and the communicator that carries slices; called again, the latter only."""
        now = self._now
        if now is None:
            now = self._now = _UnderWay(order.epoch, set(self.pool))
        elif now.transfer is not None:
            now.transfer.close()
        now.devices = order.devices
        for build in order.builds:
            now.builds[build.model_stage] = build
            self._rank.orders.setdefault(build.model_stage, build)
            links = connect_links(self._context, build.model_stage, build.plan, order.epoch)
            now.links[build.model_stage] = links
        index = order.devices.index(self._context.device)
        now.transfer = self._rank.connect("transfer", order.epoch, index, len(order.devices))
        if order.sync is not None:
            now.sync = self._rank.make_sync(order.epoch, *order.sync)

    @property
    def _attempt(self) -> _UnderWay:
        assert self._now is not None, "no transition is under way"
        return self._now

    # Primitives

    @torch.no_grad()
    def run(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        """Do this device's part of a primitive; return the bytes that it received or read."""
        if primitive.kind == "destroy":
            for unit in primitive.frees:
                self._free(UnitKey.of(unit))
            return 0
        old = [self.pool[UnitKey.of(unit)] for unit in primitive.frees if self._has(unit)]
        for unit in primitive.frees:
            self._dissolve(UnitKey.of(unit))
        source = next((self.pool[UnitKey.of(unit)] for unit in primitive.reads if self._has(unit)), None)
        target = self._make(primitive, source)
        shares = self._context.device in primitive.shares
        copies, missing = self._copies(primitive)
        received = 0
        for chunk in self._chunks(primitive):
            if target is not None and not shares:
                target.make(chunk)
            received += self._move(primitive, copies, chunk, source, target)
            for held in old:
                held.free(chunk)
        for unit in primitive.frees:
            self.pool.pop(UnitKey.of(unit), None)
        if restore is not None and missing:
            assert target is not None
            received += self._read(primitive, restore, missing, target)
        self._feeds.pop(primitive.id, None)
        return received

    def _has(self, unit: Emu) -> bool:
        return self._context.device in unit.devices and UnitKey.of(unit) in self.pool

    def _make(self, primitive: Primitive, source: HeldTensors | None) -> HeldTensors | None:
        """Enter the new unit in the pool, still empty, or with the tensors that it takes over."""
        device = self._context.device
        unit = next((unit for unit in primitive.makes if device in unit.devices), None)
        if unit is None:
            return None
        target = self._rank.describe(unit.model_stage, unit.layout, unit.rank_of(device))
        if device in primitive.shares:
            target.take(self._twin(unit))
        self.pool[UnitKey.of(unit)] = target
        return target

    def _twin(self, unit: Emu) -> HeldTensors:
        device = self._context.device
        return next(
            held
            for key, held in self.pool.items()
            if (key.model_stage, key.layout) == (unit.model_stage, unit.layout)
            and device in key.devices
            and key.devices.index(device) == unit.rank_of(device)
        )

    def _chunks(self, primitive: Primitive) -> Sequence[Chunk | None]:
        if not primitive.in_place:
            return (None,)
        spec = self._spec(primitive.model_stage)
        return chunk_order(spec, primitive.frees[0].layout, primitive.makes[0].layout)

    def _spec(self, model_stage: str) -> ModelSpec:
        return self._rank.spec_of(model_stage)

    def _copies(self, primitive: Primitive) -> tuple[Sequence[Copy], Sequence]:
        specs = {primitive.model_stage: self._spec(primitive.model_stage)}
        if primitive.kind == "restore":
            restoration = restoration_of(primitive, specs)
            device = self._context.device
            return [c for c in restoration.copies if c.target == device], restoration.missing.get(device, ())
        return copies_of(primitive, specs), ()

    def _move(
        self,
        primitive: Primitive,
        copies: Sequence[Copy],
        chunk: Chunk | None,
        source: HeldTensors | None,
        target: HeldTensors | None,
    ) -> int:
        spec = self._spec(primitive.model_stage)
        trains = stage_of(primitive.model_stage) == "training"
        names = self._rank.prefixes(primitive.model_stage)
        mine = [
            Copy(copy.source, copy.target, part)
            for copy in copies
            if chunk is None or tensors(spec)[copy.slice.name].place == chunk
            for part in prefixed(copy.slice, names)
        ]
        peers = max(1, len(self._attempt.devices) - 1)
        transfer = WeightSync(
            mine,
            self._attempt.devices,
            self._context.device,
            dtype=self._rank.dtype_of(primitive.model_stage, trains),
            torch_device=self._context.torch_device,
            bucket_bytes=min(SYNC_BUCKET_BYTES, TRANSFER_BUFFER_BYTES // (2 * peers)),
        )
        assert self._attempt.transfer is not None
        transfer.run(source, target, self._attempt.transfer)
        self._attempt.transfer.trim()
        return transfer.received_bytes

    def _read(self, primitive: Primitive, restore: RestoreOrder, missing: Sequence, target: HeldTensors) -> int:
        """Fill what no unit on this device holds from the staged set, or from the model's source."""
        if restore.source is not None:
            with contextlib.closing(restore.source.open()) as source:
                for part in missing:
                    source.read(part, target.find(part))
            return sum(part.num_elements for part in missing) * target.dtype.itemsize
        wanted = [(named, target.find(named)) for part in missing for named in prefixed(part, target.tensors)]
        reader = StateReader(restore.folder, restore.group, wanted, buffer_bytes=RESTORE_BUFFER_BYTES)
        try:
            for record in restore.shards:
                reader.feed(record)
            if not restore.complete:
                self._follow(primitive.id, reader)
            reader.finish()
        finally:
            reader.close()
        return reader.bytes_read

    def _follow(self, id: str, reader: StateReader) -> None:
        deadline = time.monotonic() + _FEED_LIMIT_S
        while True:
            try:
                record, failure = self._feeds[id].get(timeout=_POLL_S)
            except queue.Empty:
                if self._context.abort.is_set():
                    raise CommunicatorAborted("the command was aborted while it waited for a staged set") from None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{id} waited for its staged set in vain for {_FEED_LIMIT_S:g} s") from None
                continue
            if failure is not None:
                raise CommunicatorAborted(f"the staged set will not be complete: {failure}")
            if record is None:
                return
            reader.feed(record)

    def feed(self, primitive_id: str, record: ShardRecord | None, failure: str | None) -> None:
        """Hand a `restore` another record; from a thread of its own."""
        self._feeds[primitive_id].put((record, failure))

    def drop(self, primitive: Primitive) -> None:
        """Let go of what a failed primitive was making."""
        for unit in primitive.makes:
            if UnitKey.of(unit) not in self._attempt.before:
                self.pool.pop(UnitKey.of(unit), None)

    def _free(self, key: UnitKey) -> None:
        self._dissolve(key)
        self.pool.pop(key, None)

    def _dissolve(self, key: UnitKey) -> None:
        """Take a unit in force off its tensors; its links stay."""
        unit = self._rank.units.get(key.model_stage)
        if unit is None or unit.key != key:
            return
        del self._rank.units[key.model_stage]
        self._rank.shards.hold(key.model_stage, None)
        training = unit.training
        counters = Counters(training.updates, training.skipped_in_a_row) if training else Counters()
        self._attempt.dissolved[key.model_stage] = _Dissolved(
            unit.replica, unit.links, key, counters, unit.policy_version
        )

    # Checksums

    def sum_up(self, keys: Sequence[UnitKey]) -> dict[UnitKey, dict[str, int]]:
        """Return the checksums of what this device holds of some units."""
        return {key: self.pool[key].sums() for key in keys}

    # The ends

    def commit(self, counters: Mapping[str, Counters], policy_version: int) -> None:
        """Form the new plan's units over their links."""
        now = self._attempt
        for name, build in now.builds.items():
            replica, links = now.links[name]
            size = build.plan.layout.size
            key = UnitKey(name, build.plan.layout, build.plan.devices[replica * size : (replica + 1) * size])
            old = self._rank.units.pop(name, None)
            if old is not None:
                now.replaced.append(old.links)
            self._rank.orders[name] = build
            self._rank.form(key, replica, links, counters.get(name, Counters()), policy_version)
        now.links.clear()
        if now.sync is not None:
            self._rank.replace_sync(now.sync)
            now.sync = None

    def end(self) -> None:
        """Close what belonged to the old plan, and the communicator that carried slices."""
        now = self._attempt
        for links in (*now.replaced, *(gone.links for gone in now.dissolved.values())):
            links.close()
        in_force = {unit.key for unit in self._rank.units.values()}
        assert set(self.pool) == in_force, f"{set(self.pool) ^ in_force} is left over"
        self._close()

    def undo(self) -> None:
        """Form the old plan's units again, and let go of all that belonged to the new one."""
        if self._now is None:
            return
        now = self._now
        for key in set(self.pool) - now.before:
            del self.pool[key]
        for gone in now.dissolved.values():
            self._rank.form(gone.key, gone.replica, gone.links, gone.counters, gone.policy_version)
        self._close()

    def _close(self) -> None:
        now, self._now = self._now, None
        self._feeds.clear()
        if now is None:
            return
        for _, links in now.links.values():
            links.close()
        if now.sync is not None:
            now.sync[1].close()
        if now.transfer is not None:
            now.transfer.close()

    def release(self) -> None:
        """Let go of everything."""
        if self._now is not None:
            for gone in self._now.dissolved.values():
                gone.links.close()
            for links in self._now.replaced:
                links.close()
        self._close()
        self.pool.clear()
