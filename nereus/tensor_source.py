"""Tensors of a staged set or of a checkpoint, read part by part: what the tools that copy them stand on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

BATCH_BYTES = 64 * 2**20  # of the parts that are in memory at a time, unless one part alone is larger


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

    def read(self, parts: Sequence[TensorSlice]) -> list[Tensor]:
        """Return parts of tensors as new CPU tensors."""

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

    def read(self, parts: Sequence[TensorSlice]) -> list[Tensor]:
        """Return parts of tensors.

        Raises:
            DamagedState: a shard is missing, or a byte of it is not what was written.
        """
        outs = [torch.empty(part.sizes, dtype=self.dtypes[part.name]) for part in parts]
        needed = {
            number for part in parts for piece, number in self._pieces[part.name] if part.intersect(piece) is not None
        }
        reader = StateReader(self._url, self._group, list(zip(parts, outs, strict=True)))
        try:
            for number in sorted(needed):
                reader.feed(self._shards[number])
            reader.finish()
        finally:
            reader.close()
        return outs

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

    def read(self, parts: Sequence[TensorSlice]) -> list[Tensor]:
        outs = [torch.empty(part.sizes, dtype=self.dtypes[part.name]) for part in parts]
        for part, out in zip(parts, outs, strict=True):
            self._source.read(part, out)
        return outs

    def close(self) -> None:
        self._source.close()


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
