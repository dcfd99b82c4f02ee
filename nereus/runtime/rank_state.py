"""A worker's part of staged state: its shards, written from live tensors or from copies, and its slices read back.

Writing runs in threads beside the main one while that generates and infers: nobody changes these tensors then, and
nothing here uses a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.limits import RESTORE_BUFFER_BYTES
from nereus.model.decoder import DecoderShard
from nereus.model.spec import ModelSpec
from nereus.runtime.training import TrainingUnit
from nereus.runtime.unit_tensors import HeldTensors
from nereus.staged_state import ShardOrder, staged_shapes, wanted_slices
from storage.manifest import DamagedState, ShardRecord
from storage.shard_writer import ShardWriter
from storage.slices import TensorSlice
from storage.state_reader import StateReader


@dataclass(frozen=True)
class Counters:
    """What a training model-stage counts: updates done, and updates skipped since the last one."""

    updates: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class Restored:
    """What reading a group back came to: bytes of tensors read, and what was wrong with the set, if anything."""

    num_bytes: int
    damage: str | None = None


class StagedUnit:
    """The tensors of one training model-stage on this device, by their names in staged state."""

    def __init__(self, shard: DecoderShard, training: TrainingUnit, held: HeldTensors) -> None:
        self.shard, self.training = shard, training
        self._held = held

    @property
    def spec(self) -> ModelSpec:
        return self.shard.spec

    def find(self, part: TensorSlice) -> Tensor:
        """Return the live memory of a slice that this rank holds."""
        return self._held.find(part)

    def restore(self, group: str, folder: str, shards: Sequence[ShardRecord], counters: Counters) -> Restored:
        """Fill parameters, moments and counters from a committed set; damage is told, not raised."""
        wanted = [(part, self.find(part)) for part in wanted_slices(self.spec, self.shard.layout, self.shard.rank)]
        reader = StateReader(folder, group, wanted, buffer_bytes=RESTORE_BUFFER_BYTES)
        try:
            for record in shards:
                reader.feed(record)
            reader.finish()
        except (DamagedState, FileNotFoundError) as error:
            return Restored(reader.bytes_read, str(error))
        finally:
            reader.close()
        self.training.optimizer.updates = counters.updates
        self.training.skipped_in_a_row = counters.skipped_in_a_row
        self.training.refresh_compute_weights()
        return Restored(reader.bytes_read)


class ShardWorks:
    """The shards that this device writes for each commit, and copies of those that an update would overwrite."""

    def __init__(self, orders: Sequence[ShardOrder], holding: Callable[[str, TensorSlice], HeldTensors]) -> None:
        """Take the orders.

        Args:
            holding: finds who holds a piece of a group at the moment of writing: units may come and go in between.
        """
        self._orders = {order.file: order for order in orders}
        self._holding = holding
        self._copies: dict[str, list[Tensor]] = {}

    def write(self, folder: str, file: str) -> ShardRecord:
        """Write one shard; its copy, if there is one, is freed."""
        order = self._orders[file]
        holder = self._holding(order.group, order.pieces[0])
        shapes = staged_shapes(holder.spec)
        writer = ShardWriter(folder, group=order.group, file=file)
        for piece, tensor in zip(order.pieces, self._copies.get(file) or self._live(order), strict=True):
            writer.add(piece, shapes[piece.name], tensor)
        with _beside_compute(holder.device):
            record = writer.finish_shard()
        self._copies.pop(file, None)
        return record

    @torch.no_grad()
    def preserve(self, files: Collection[str]) -> None:
        """Copy what these shards hold, so that updates may change the live tensors."""
        for file in files:
            live = self._live(self._orders[file])
            with _beside_compute(live[0].device):
                self._copies[file] = _copy_together(live)

    def drop_copies(self) -> None:
        """Free all copies, after a commit that was given up."""
        self._copies.clear()

    def _live(self, order: ShardOrder) -> list[Tensor]:
        return [self._holding(order.group, piece).find(piece) for piece in order.pieces]


def _copy_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors of one dtype, all in one piece of memory."""
    sizes = [tensor.numel() for tensor in tensors]
    flat = torch.empty(sum(sizes), dtype=tensors[0].dtype, device=tensors[0].device)
    copies = [part.view(tensor.shape) for part, tensor in zip(flat.split(sizes), tensors, strict=True)]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    return copies


@contextmanager
def _beside_compute(device: torch.device) -> Iterator[None]:
    """On CUDA, read on a stream of its own, behind the updates that are queued and not behind what comes later."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.default_stream(device))
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
