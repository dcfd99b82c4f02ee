"""A worker's part of a transition: units in the pool are made, filled and freed; links of the new plan wait beside.

begin: connect -> run: primitive by primitive -> commit: units over the new links -> run: free -> end: close old links
                                              -> undo: units over the old links again, close the new ones
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from nereus.emu import Emu
from nereus.layout import Copy
from nereus.limits import RESTORE_BUFFER_BYTES
from nereus.model.spec import ModelSpec, tensors
from nereus.plan import stage_of
from nereus.runtime.communicator import Communicator, CommunicatorAborted
from nereus.runtime.links import Links, connect_links
from nereus.runtime.rank_state import Counters
from nereus.runtime.shard_feeds import ShardFeeds
from nereus.runtime.slice_transfer import LEAST_IN_FLIGHT, most_peers, plan_exchange, run_exchange
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder, TransitionOrder, UnitKey
from nereus.runtime.unit_tensors import HeldTensors, named
from nereus.runtime.units import Dissolved, Units
from nereus.runtime.weight_sync import WeightSync, connect_weight_sync
from nereus.runtime.worker import WorkerContext
from nereus.staged_state import PREFIXES
from nereus.transition.chunks import Chunk, chunk_order
from nereus.transition.copies import copies_of, restoration_of
from nereus.transition.primitives import TRANSFER_BUFFER_BYTES, Primitive
from storage.slices import TensorSlice
from storage.state_reader import StateReader

SyncLink = tuple[WeightSync, Communicator]
_POLL_S = 0.1


@dataclass
class _Attempt:
    """What is connected, and what of the old plan is taken apart."""

    before: frozenset[UnitKey]
    devices: tuple[int, ...] = ()
    transfer: Communicator | None = None
    builds: dict[str, BuildOrder] = field(default_factory=dict)
    links: dict[str, tuple[int, Links]] = field(default_factory=dict)
    sync: SyncLink | None = None
    dissolved: dict[str, Dissolved] = field(default_factory=dict)
    replaced: list[Links] = field(default_factory=list)

    def close_new(self) -> None:
        """Close what was connected and isn't in force."""
        for _, links in self.links.values():
            links.close()
        self.links.clear()
        if self.sync is not None:
            self.sync[1].close()
        if self.transfer is not None:
            self.transfer.close()

    def close_old(self) -> None:
        """Close the links of units that are no longer in force."""
        for links in (*self.replaced, *(gone.links for gone in self.dissolved.values())):
            links.close()


class RankTransition:
    """One device's side of transitions, one after the other."""

    def __init__(self, context: WorkerContext, units: Units) -> None:
        self._context, self._units = context, units
        self._attempt: _Attempt | None = None
        self.feeds = ShardFeeds()

    # Connecting

    def begin(self, order: TransitionOrder) -> None:
        """Connect the new plan's links, and what carries slices and weights; called again on a way back: the latter."""
        attempt = self._attempt
        if attempt is None:
            attempt = self._attempt = _Attempt(frozenset(self._units.pool))
        if attempt.transfer is not None:
            attempt.transfer.close()
            attempt.transfer = None
        attempt.devices = order.devices
        for build in order.builds:
            attempt.builds[build.model_stage] = build
            self._units.orders.setdefault(build.model_stage, build)
            attempt.links[build.model_stage] = connect_links(self._context, build.model_stage, build.plan, order.epoch)
        attempt.transfer = Communicator.connect(
            store_address=self._context.store_address,
            name="transfer",
            epoch=order.epoch,
            rank=order.devices.index(self._context.device),
            size=len(order.devices),
            torch_device=self._context.torch_device,
            abort=self._context.abort,
        )
        if order.sync is not None:
            build = self._units.order_of("actor.training")
            attempt.sync = connect_weight_sync(self._context, build, order.epoch, *order.sync)

    @property
    def _now(self) -> _Attempt:
        assert self._attempt is not None, "no transition is under way"
        return self._attempt

    # Primitives

    @torch.no_grad()
    def run(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        """Do this device's part of a primitive; return the bytes that it received or read.

        New tensors enter the pool when they are filled: what a failure leaves half done is gone with it. Only a
        conversion in place leaves less than there was.
        """
        if primitive.kind == "destroy":
            self._take_apart(primitive)
            return 0
        work = _Work.of(primitive, self._spec(primitive.model_stage), self._context.device)
        source = next((held for unit in primitive.reads if (held := self._units.find(unit)) is not None), None)
        made = next((unit for unit in primitive.makes if self._context.device in unit.devices), None)
        target = None if made is None else self._describe(made, is_shared=self._context.device in primitive.shares)
        old = self._take_apart(primitive)
        received = 0
        for chunk in work.chunks:
            if target is not None and self._context.device not in primitive.shares:
                target.make(chunk)
            received += self._move(work, chunk, source, target)
            for held in old:
                held.free(chunk)
        self._trim()
        if work.missing and target is not None:
            assert restore is not None, primitive.id
            received += self._read(restore, work.missing, target)
        if made is not None and target is not None:
            self._units.pool[UnitKey.of(made)] = target
        return received

    def _spec(self, model_stage: str) -> ModelSpec:
        return self._units.order_of(model_stage).source.spec

    def _describe(self, unit: Emu, *, is_shared: bool) -> HeldTensors:
        """Return the tensors of a new unit: none yet, or those that an equal rank of an old one has here."""
        rank = unit.rank_of(self._context.device)
        target = self._units.describe(unit.model_stage, unit.layout, rank)
        if is_shared:
            equal = (unit.model_stage, unit.layout, rank)
            target.take_over(
                next(
                    held
                    for key, held in self._units.pool.items()
                    if (key.model_stage, key.layout, key.devices.index(self._context.device)) == equal
                )
            )
        return target

    def _take_apart(self, primitive: Primitive) -> list[HeldTensors]:
        """Take what a primitive frees out of the pool, and off the units in force."""
        freed = []
        for unit in primitive.frees:
            key = UnitKey.of(unit)
            gone = self._units.dissolve(key)
            if gone is not None:
                self._now.dissolved[unit.model_stage] = gone
            held = self._units.pool.pop(key, None)
            if held is not None:
                held.drop_weights()
                freed.append(held)
        return freed

    def _move(self, work: _Work, chunk: Chunk | None, source: HeldTensors | None, target: HeldTensors | None) -> int:
        """Copy, send and receive what belongs to a chunk; return the bytes received."""
        attempt, dtype = self._now, self._units.dtype_of(work.model_stage)
        assert attempt.transfer is not None
        window_bytes = min(attempt.transfer.window_bytes, TRANSFER_BUFFER_BYTES // work.peers)
        most_bytes = min(attempt.transfer.message_bytes, window_bytes // LEAST_IN_FLIGHT)
        exchange = plan_exchange(
            work.copies.get(chunk, ()),
            attempt.devices,
            self._context.device,
            most_elements=most_bytes // dtype.itemsize,
            window_elements=window_bytes // dtype.itemsize,
            lone_elements=min(most_bytes, attempt.transfer.lone_bytes) // dtype.itemsize,
        )
        run_exchange(exchange, source, target, attempt.transfer, dtype)
        return exchange.received_elements * dtype.itemsize

    def _trim(self) -> None:
        assert self._now.transfer is not None
        self._now.transfer.trim()

    def _read(self, order: RestoreOrder, missing: Sequence[TensorSlice], target: HeldTensors) -> int:
        """Fill what no unit on this device holds from the staged set, or from the model's source."""
        if order.source is not None:
            with contextlib.closing(order.source.open()) as source:
                for part in missing:
                    self._check_abort()
                    source.read(part, target.find(part))
            return sum(part.num_elements for part in missing) * target.dtype.itemsize
        wanted = [(part, target.find(part)) for piece in missing for part in named(piece, target.tensors)]
        reader = StateReader(order.folder, order.group, wanted, buffer_bytes=RESTORE_BUFFER_BYTES)
        try:
            for record in order.shards:
                reader.feed(record)
            for record in self.feeds.records(order.feed, self._check_abort) if order.feed else ():
                reader.feed(record)
            while not reader.is_through(_POLL_S):
                self._check_abort()
            reader.finish()
            return reader.bytes_read
        finally:
            # After an abort a store that hangs isn't waited for: it fills tensors that nobody will ever see.
            reader.close(may_hang=self._context.abort.is_set())

    def _check_abort(self) -> None:
        if self._context.abort.is_set():
            raise CommunicatorAborted("the command was aborted while it read staged state")

    def drop(self, primitive: Primitive) -> None:
        """Let go of what a primitive was making that failed on some device, perhaps not on this one."""
        for unit in primitive.makes:
            if self._attempt is not None and UnitKey.of(unit) not in self._attempt.before:
                self._units.pool.pop(UnitKey.of(unit), None)

    def sum_up(self, keys: Sequence[UnitKey]) -> dict[UnitKey, dict[str, int]]:
        """Return the checksums of what this device holds of some units, by tensor in staged state."""
        return {key: self._units.pool[key].sums() for key in keys}

    # The ends

    def commit(self, counters: Mapping[str, Counters], policy_version: int) -> SyncLink | None:
        """Put the new plan's units in force; return the weight sync that replaces the old one, if there is one."""
        attempt = self._now
        for name, build in attempt.builds.items():
            old = self._units.in_force.pop(name, None)
            if old is not None:
                attempt.replaced.append(old.links)
                old.let_go()
            replica, links = attempt.links.pop(name)
            self._units.form(build, replica, links, counters.get(name, Counters()), policy_version)
        sync, attempt.sync = attempt.sync, None
        return sync

    def end(self) -> None:
        """Close what belonged to the old plan, and the communicator that carried slices."""
        attempt, self._attempt = self._now, None
        attempt.close_new()
        attempt.close_old()
        self.feeds.clear()
        in_force = {unit.key for unit in self._units.in_force.values()}
        assert set(self._units.pool) == in_force, f"{set(self._units.pool) ^ in_force} is left over, or missing"
        self._units.forget_orders()

    def undo(self) -> None:
        """Put the old plan's units in force again, and let go of all that belonged to the new one."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:  # it had not begun here
            return
        for key in set(self._units.pool) - attempt.before:
            del self._units.pool[key]
        for gone in attempt.dissolved.values():
            self._units.form(gone.order, gone.replica, gone.links, gone.counters, gone.policy_version)
        attempt.close_new()
        self.feeds.clear()
        self._units.forget_orders()

    def release(self) -> None:
        """Give the attempt under way up, with all it has connected."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close_new()
            attempt.close_old()
        self.feeds.clear()


@dataclass(frozen=True)
class _Work:
    """A primitive as this device sees it.

    Attributes:
        chunks: in this order; one, None, where all is done at once.
        copies: by chunk, of all devices, with a slice for each tensor of its state.
        missing: what this device reads from elsewhere.
        peers: most others that any device exchanges slices with in one direction.
    """

    model_stage: str
    chunks: tuple[Chunk | None, ...]
    copies: Mapping[Chunk | None, Sequence[Copy]]
    missing: Sequence[TensorSlice]
    peers: int

    @classmethod
    def of(cls, primitive: Primitive, spec: ModelSpec, device: int) -> _Work:
        name, missing = primitive.model_stage, tuple[TensorSlice, ...]()
        if primitive.kind == "restore":
            restoration = restoration_of(primitive, {name: spec})
            copies, missing = restoration.copies, restoration.missing.get(device, ())
        else:
            copies = copies_of(primitive, {name: spec})
        chunks: tuple[Chunk | None, ...] = (None,)
        if primitive.in_place:
            chunks = chunk_order(spec, primitive.frees[0].layout, primitive.makes[0].layout)
        by_chunk: dict[Chunk | None, list[Copy]] = defaultdict(list)
        prefixes = PREFIXES if stage_of(name) == "training" else ("",)
        for copy in copies:
            if device in (copy.source, copy.target):
                chunk = tensors(spec)[copy.slice.name].place if primitive.in_place else None
                by_chunk[chunk] += [Copy(copy.source, copy.target, part) for part in named(copy.slice, prefixes)]
        return cls(name, chunks, by_chunk, missing, most_peers(copies))
