"""Tensors of a staged set or of a checkpoint, read part by part: what the tools that copy them stand on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from nereus.model.checkpoint import locate_tensors
from nereus.model.spec import ModelSpec, tensors
from nereus.model.weights import CheckpointSource
from storage.manifest import Manifest
from storage.safetensors_header import DTYPES
from storage.slices import TensorSlice, whole
from storage.state_reader import StateReader

BATCH_BYTES = 32 * 2**20  # of parts that are read together, unless one part alone is larger
_ALIGNMENT = 64


class TensorSource(Protocol):
    """Some tensors of which any part can be read.

    Attributes:
        shapes: of the whole tensors, by canonical name.
        dtypes: as they are stored.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    def batches(self, names: Iterable[str]) -> Iterator[list[TensorSlice]]:
        """Yield all parts of some tensors, as they are read best; a batch has BATCH_BYTES, or is one part."""

    def read(self, parts: Sequence[TensorSlice], outs: Sequence[Tensor]) -> None:
        """Fill CPU tensors of the parts' sizes and dtypes."""

    def close(self) -> None:
        """Close what is open."""


class StateSource:
    """One group of a committed set; every byte is checked while it is read."""

    def __init__(self, url: str, manifest: Manifest, group: str) -> None:
        self._url, self._group = url, group
        self._shards = manifest.shards_of(group)
        metas = manifest.tensors_of(group)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: meta.shape for name, meta in metas.items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: DTYPES[meta.dtype] for name, meta in metas.items()}
        self._pieces: dict[str, list[tuple[TensorSlice, int]]] = {name: [] for name in metas}
        for number, shard in enumerate(self._shards):
            for piece in shard.pieces:
                self._pieces[piece.part.name].append((piece.part, number))

    def batches(self, names: Iterable[str]) -> Iterator[list[TensorSlice]]:
        """Yield whole pieces, shard after shard, so that each file is opened once or twice."""
        wanted = set(names)
        parts = (piece.part for shard in self._shards for piece in shard.pieces if piece.part.name in wanted)
        yield from _batches(parts, self.dtypes)

    def read(self, parts: Sequence[TensorSlice], outs: Sequence[Tensor]) -> None:
        """Fill tensors with parts of this group's.

        Raises:
            DamagedState: a shard is missing, or a byte of it is not what was written.
        """
        needed = {
            number for part in parts for piece, number in self._pieces[part.name] if part.intersect(piece) is not None
        }
        with StateReader(self._url, self._group, list(zip(parts, outs, strict=True))) as reader:
            for number in sorted(needed):
                reader.feed(self._shards[number])
            reader.finish()

    def close(self) -> None:
        """Nothing stays open between two reads."""


class HuggingFaceSource:
    """A Hugging Face checkpoint under its canonical names."""

    def __init__(self, path: str, spec: ModelSpec) -> None:
        """Find every tensor by the files' headers.

        Raises:
            ValueError: the checkpoint doesn't hold the spec's tensors.
        """
        places = locate_tensors(path, spec)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: info.shape for name, info in tensors(spec).items()}
        self.dtypes: Mapping[str, torch.dtype] = {name: place.entry.torch_dtype for name, place in places.items()}
        self._source = CheckpointSource(path, spec)

    def batches(self, names: Iterable[str]) -> Iterator[list[TensorSlice]]:
        """Yield runs of rows."""
        parts = (part for name in names for part in self._row_blocks(name))
        yield from _batches(parts, self.dtypes)

    def _row_blocks(self, name: str) -> Iterator[TensorSlice]:
        part = whole(name, self.shapes[name])
        if not part.sizes:
            yield part
            return
        row_bytes = max(1, math.prod(part.sizes[1:]) * self.dtypes[name].itemsize)
        step = max(1, BATCH_BYTES // row_bytes)
        for start in range(0, part.sizes[0], step):
            count = min(step, part.sizes[0] - start)
            yield replace(part, starts=(start, *part.starts[1:]), sizes=(count, *part.sizes[1:]))

    def read(self, parts: Sequence[TensorSlice], outs: Sequence[Tensor]) -> None:
        """Fill tensors with parts of the checkpoint's."""
        for part, out in zip(parts, outs, strict=True):
            self._source.read(part, out)

    def close(self) -> None:
        self._source.close()


def read_ahead(
    source: TensorSource, batches: Iterable[Sequence[TensorSlice]]
) -> Iterator[tuple[Sequence[TensorSlice], list[Tensor]]]:
    """Yield each batch with its tensors, which stay as they are until the next one is asked for.

    One batch is read while the one before is worked on. Memory: two batches, in buffers that are used again and again.
    """
    arenas = (_Arena(), _Arena())
    read: tuple[Sequence[TensorSlice], list[Tensor], Future[None]] | None = None
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as thread:
        for number, parts in enumerate(batches):
            outs = arenas[number % 2].take([(part.sizes, source.dtypes[part.name]) for part in parts])
            reading = thread.submit(source.read, parts, outs)
            if read is not None:
                read[2].result()
                yield read[:2]
            read = (parts, outs, reading)
        if read is not None:
            read[2].result()
            yield read[:2]


class _Arena:
    """One buffer that tensors are cut from, all anew each time; fresh memory would cost a page fault every 4 KiB."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, wanted: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in wanted]
        starts = [0, *itertools.accumulate(size + -size % _ALIGNMENT for size in sizes)]
        if starts[-1] > len(self._buffer):
            self._buffer = torch.empty(starts[-1], dtype=torch.uint8)
        return [
            self._buffer[start : start + size].view(dtype).view(shape)
            for (shape, dtype), start, size in zip(wanted, starts, sizes, strict=False)
        ]


def check_tensors(source: TensorSource, spec: ModelSpec, where: str) -> None:
    """Raise ValueError when a source doesn't hold the parameters of a model."""
    for name, info in tensors(spec).items():
        if source.shapes.get(name) != info.shape:
            found = source.shapes.get(name)
            has = f"tensor {name} as {list(found)}" if found is not None else f"no tensor {name}"
            raise ValueError(f"{where} holds {has}, where its model has {list(info.shape)}; it is of another model.")


def _batches(parts: Iterable[TensorSlice], dtypes: Mapping[str, torch.dtype]) -> Iterator[list[TensorSlice]]:
    batch: list[TensorSlice] = []
    size = 0
    for part in parts:
        num_bytes = part.num_elements * dtypes[part.name].itemsize
        if batch and size + num_bytes > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += num_bytes
    if batch:
        yield batch
