"""Weights from actor.training to actor.generation, for any pair of layouts: few large messages, versioned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from nereus.layout import Copy, plan_copies
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.decoder import DecoderShard, ShardView
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan
from nereus.runtime.communicator import Communicator, Pending
from storage.slices import TensorSlice


@lru_cache(maxsize=8)
def sync_copies(spec: ModelSpec, training: StagePlan, generation: StagePlan) -> tuple[Copy, ...]:
    """Return the copies of one weight sync; every device computes the same list."""
    return tuple(plan_copies(spec, training.layout, training.replicas, generation.layout, generation.replicas))


class Slices(Protocol):
    """What a device holds, by slices."""

    def find(self, part: TensorSlice) -> Tensor:
        """Return a view of exactly `part`."""


class SliceStore:
    """Finds the live memory of a part of a canonical tensor among a rank's parameters."""

    def __init__(self, shard: DecoderShard, tensors: Mapping[str, Tensor]) -> None:
        self._views: dict[str, list[ShardView]] = {}
        for view in shard.views():
            self._views.setdefault(view.slice.name, []).append(view)
        self._tensors = tensors

    def find(self, part: TensorSlice) -> Tensor:
        """Return a view of exactly `part`, which this rank must hold."""
        for view in self._views.get(part.name, ()):
            if view.slice.intersect(part) == part:
                return view.of(self._tensors[view.parameter])[part.within(view.slice)]
        raise AssertionError(f"{part} is not held here")


@dataclass(frozen=True)
class Bucket:
    """Parts that travel between two devices in one message."""

    parts: tuple[TensorSlice, ...]
    num_elements: int


def cut_buckets(parts: Sequence[TensorSlice], most_elements: int) -> list[Bucket]:
    """Group parts, in order, into messages of at most `most_elements`; a part larger than that is cut along rows."""
    buckets: list[Bucket] = []
    held: list[TensorSlice] = []
    size = 0
    for part in (piece for whole in parts for piece in _cut_rows(whole, most_elements)):
        if held and size + part.num_elements > most_elements:
            buckets.append(Bucket(tuple(held), size))
            held, size = [], 0
        held.append(part)
        size += part.num_elements
    if held:
        buckets.append(Bucket(tuple(held), size))
    return buckets


def _cut_rows(part: TensorSlice, most_elements: int) -> Iterator[TensorSlice]:
    if part.num_elements <= most_elements:
        yield part
        return
    row = part.num_elements // part.sizes[0]
    step = max(1, most_elements // row)
    for start in range(0, part.sizes[0], step):
        rows = min(step, part.sizes[0] - start)
        yield TensorSlice(part.name, (part.starts[0] + start, *part.starts[1:]), (rows, *part.sizes[1:]))


class WeightSync:
    """One device's part of a weight sync: what it keeps, sends and receives. Its own buffers live for one `run`."""

    def __init__(
        self,
        copies: Sequence[Copy],
        devices: Sequence[int],
        device: int,
        *,
        dtype: torch.dtype,
        torch_device: torch.device,
        bucket_bytes: int = SYNC_BUCKET_BYTES,
    ) -> None:
        self.torch_device = torch_device
        most = bucket_bytes // dtype.itemsize
        self.dtype = dtype
        self.local = [copy.slice for copy in copies if copy.source == copy.target == device]
        self.sends: dict[int, list[Bucket]] = {}
        self.receives: dict[int, list[Bucket]] = {}
        for peer in devices:
            if peer == device:
                continue
            outgoing = [c.slice for c in copies if (c.source, c.target) == (device, peer)]
            incoming = [c.slice for c in copies if (c.source, c.target) == (peer, device)]
            if outgoing:
                self.sends[devices.index(peer)] = cut_buckets(outgoing, most)
            if incoming:
                self.receives[devices.index(peer)] = cut_buckets(incoming, most)

    @property
    def received_bytes(self) -> int:
        return sum(b.num_elements for buckets in self.receives.values() for b in buckets) * self.dtype.itemsize

    def run(self, source: Slices | None, target: Slices | None, communicator: Communicator) -> None:
        """Copy everything; `communicator` spans `devices`. All sends and receives of a round are posted before any is
        awaited, so no order of rounds can deadlock. Two rounds are in flight, and they alternate between two buffers
        for each peer and direction."""
        for part in self.local:
            assert source is not None and target is not None
            target.find(part).copy_(source.find(part))
        buffers: dict[tuple[str, int, int], Tensor] = {}

        def buffer_for(direction: str, peer: int, index: int, num_elements: int) -> Tensor:
            key = (direction, peer, index % 2)
            if key not in buffers or len(buffers[key]) < num_elements:
                buffers[key] = torch.empty(num_elements, dtype=self.dtype, device=self.torch_device)
            return buffers[key][:num_elements]

        rounds = max((len(b) for b in (*self.sends.values(), *self.receives.values())), default=0)
        waiting: list[Callable[[], None]] = []
        for index in range(rounds):
            posted: list[Callable[[], None]] = []
            for peer, buckets in self.receives.items():
                if index < len(buckets):
                    assert target is not None
                    buffer = buffer_for("receive", peer, index, buckets[index].num_elements)
                    pending = communicator.recv(buffer, peer, index)
                    posted.append(_receiver(pending, buffer, buckets[index], target))
            for peer, buckets in self.sends.items():
                if index < len(buckets):
                    assert source is not None
                    message = buffer_for("send", peer, index, buckets[index].num_elements)
                    _gather(buckets[index], source, message)
                    posted.append(communicator.send(message, peer, index).wait)
            for finish in waiting:
                finish()
            waiting = posted
        for finish in waiting:
            finish()


def _gather(bucket: Bucket, source: Slices, message: Tensor) -> None:
    offset = 0
    for part in bucket.parts:
        message[offset : offset + part.num_elements].view(part.sizes).copy_(source.find(part))
        offset += part.num_elements


def _receiver(pending: Pending, buffer: Tensor, bucket: Bucket, target: Slices) -> Callable[[], None]:
    def finish() -> None:
        pending.wait()
        offset = 0
        for part in bucket.parts:
            target.find(part).copy_(buffer[offset : offset + part.num_elements].view(part.sizes))
            offset += part.num_elements

    return finish
