"""The chunks in which units are converted in place: embedding, each layer, norm and head, and their order."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Literal

import numpy as np

from nereus.layout import Layout, partition, stages_of, tensor_slices
from nereus.model.spec import ModelSpec, TensorInfo, tensors

# What `TensorInfo.place` says of the tensors of a chunk.
Chunk = int | Literal["embed", "norm", "head"]


@lru_cache(maxsize=1024)
def chunk_order(spec: ModelSpec, source: Layout, target: Layout) -> tuple[Chunk, ...]:
    """Return the chunks in the order in which they are converted from one layout to the other.

    Runs of layers that lie on the same stages in both layouts take turns: then no device receives many layers before
    it may give others away, and the peak is a few layers above what it holds before or after.
    """
    runs: dict[tuple[int, int], list[int]] = {}
    for layer in range(spec.layers):
        runs.setdefault((_stage_of(spec, source, layer), _stage_of(spec, target, layer)), []).append(layer)
    turns = itertools.zip_longest(*runs.values())
    layers = [layer for turn in turns for layer in turn if layer is not None]
    there = {info.place for info in tensors(spec).values()}
    ends: list[Chunk] = [chunk for chunk in ("embed", "head", "norm") if chunk in there]  # type: ignore[misc]
    return (*ends, *layers)


def _stage_of(spec: ModelSpec, layout: Layout, layer: int) -> int:
    return next(i for i, (start, stop) in enumerate(partition(spec.layers, layout.pp)) if start <= layer < stop)


@lru_cache(maxsize=1024)
def chunk_elements(spec: ModelSpec, layout: Layout) -> dict[Chunk, tuple[int, ...]]:
    """Return the elements of each chunk by rank."""
    infos: dict[Chunk, list[TensorInfo]] = {}
    for info in tensors(spec).values():
        infos.setdefault(info.place, []).append(info)
    by_tp_rank = {chunk: np.sum([_by_tp_rank(i, layout.tp) for i in infos[chunk]], axis=0) for chunk in infos if chunk}
    # All layers are equal.
    by_tp_rank[0] = np.sum([_by_tp_rank(info, layout.tp) for info in infos[0]], axis=0)
    result = {}
    for chunk, members in infos.items():
        table = np.zeros((layout.pp, layout.tp), dtype=np.int64)
        table[list(stages_of(spec, layout, members[0]))] = by_tp_rank[0 if isinstance(chunk, int) else chunk]
        result[chunk] = tuple(table.ravel().tolist())
    return result


def _by_tp_rank(info: TensorInfo, tp: int) -> np.ndarray:
    parts = tensor_slices(info, tp)
    return np.array([parts[rank if info.split else 0].num_elements for rank in range(tp)], dtype=np.int64)
