"""Small staged sets for tests: tensors cut by a pattern, written by several writers, read back by another pattern."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from storage.manifest import Manifest, ShardRecord
from storage.shard_writer import ShardWriter
from storage.slices import TensorSlice, whole
from storage.state import commit_state
from storage.state_reader import StateReader

GROUP = "actor.training"


def cut(name: str, shape: Sequence[int], dim: int | None, bounds: Sequence[int] = ()) -> list[TensorSlice]:
    """Return the cells between consecutive bounds along `dim`, empty ones included; the whole where dim is None."""
    if dim is None:
        return [whole(name, tuple(shape))]
    cells = []
    for start, stop in itertools.pairwise((0, *sorted(bounds), shape[dim])):
        starts = tuple(start if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(stop - start if d == dim else n for d, n in enumerate(shape))
        cells.append(TensorSlice(name, starts, sizes))
    return cells


def take(tensors: Mapping[str, Tensor], part: TensorSlice) -> Tensor:
    """Return a slice of one of the tensors, as a view."""
    tensor = tensors[part.name]
    return tensor[part.within(whole(part.name, tuple(tensor.shape)))]


def write_shards(
    url: str,
    tensors: Mapping[str, Tensor],
    cells: Sequence[TensorSlice],
    *,
    num_shards: int = 2,
    group: str = GROUP,
) -> list[ShardRecord]:
    """Write cells in turn into several shards."""
    records = []
    for number in range(num_shards):
        writer = ShardWriter(url, group=group, file=f"{group}-{number}.safetensors")
        for cell in cells[number::num_shards]:
            writer.add(cell, tuple(tensors[cell.name].shape), take(tensors, cell))
        records.append(writer.finish_shard())
    return records


def small_tensors(seed: int = 0) -> dict[str, Tensor]:
    """Return tensors of several dtypes and ranks, one of them without elements."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "rows": torch.randn(12, 10, generator=generator),
        "columns": torch.randn(8, 9, generator=generator),
        "half": torch.randn(5, 3, generator=generator).bfloat16(),
        "bias": torch.randn(7, generator=generator, dtype=torch.float64),
        "updates": torch.tensor(41 + seed),
        "nothing": torch.zeros(0, 4),
    }


def small_cells(tensors: Mapping[str, Tensor]) -> list[TensorSlice]:
    """Return the grid of `small_tensors`: rows by rows, columns by columns, the others whole."""
    return [
        *cut("rows", (12, 10), 0, (3, 5, 6)),
        *cut("columns", (8, 9), 1, (2, 4)),
        *(whole(name, tuple(tensors[name].shape)) for name in ("half", "bias", "updates", "nothing")),
    ]


def write_small_set(url: str, *, seed: int = 0, step: int = 3) -> tuple[dict[str, Tensor], Manifest]:
    """Write and commit a set of two shards; return its tensors and its manifest."""
    tensors = small_tensors(seed)
    records = write_shards(url, tensors, small_cells(tensors))
    manifest = Manifest("run", step, {"kl_coef": 0.1, "policy_version": 8}, {"tp": 2}, tuple(records))
    commit_state(url, manifest)
    return tensors, manifest


def read_slices(
    url: str, records: Sequence[ShardRecord], wanted: Sequence[tuple[TensorSlice, Tensor]], **options: int
) -> int:
    """Fill tensors out of shards, and return how many bytes that took."""
    with StateReader(url, GROUP, wanted, **options) as reader:
        for record in records:
            reader.feed(record)
        reader.finish()
        return reader.bytes_read


def read_whole(url: str, manifest: Manifest) -> dict[str, Tensor]:
    """Return all tensors of a small set, read through a StateReader."""
    outs = {name: torch.ones_like(tensor) for name, tensor in small_tensors().items()}
    read_slices(url, manifest.shards, [(whole(name, tuple(out.shape)), out) for name, out in outs.items()])
    return outs
