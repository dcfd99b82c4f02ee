"""Checksums of the pieces of staged state's grid, over the tensors of one rank of a unit.

What is summed up depends on model, layout and rank only, and is worked out once; then each tensor is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from nereus.layout import Layout
from nereus.model.decoder import ShardView, shard_views
from nereus.model.spec import ModelSpec, tensors
from nereus.staged_state import grid
from storage.checksums import first_element, piece_seed

_MODULUS = 2**64
# What doesn't lie in one piece is hashed through copies of this size, which stay in the cache.
_HASH_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class _Piece:
    """A piece of the grid: where it begins in the whole tensor, and where it lies in a parameter ([rows, columns])."""

    first_element: int
    rows: slice
    columns: slice

    def column_bytes(self, tensor: Tensor) -> slice:
        if self.columns.stop is None:
            return self.columns
        return slice(self.columns.start * tensor.itemsize, self.columns.stop * tensor.itemsize)


@lru_cache(maxsize=1024)
def _pieces(spec: ModelSpec, layout: Layout, rank: int) -> tuple[tuple[ShardView, tuple[_Piece, ...]], ...]:
    return tuple((view, tuple(_pieces_of(view, spec))) for view in shard_views(spec, layout, rank))


def _pieces_of(view: ShardView, spec: ModelSpec) -> list[_Piece]:
    info, held, found = tensors(spec)[view.slice.name], view.slice, []
    dim = 0 if info.split is None else info.split.dim
    start, stop = held.starts[dim], held.starts[dim] + held.sizes[dim]
    for piece in grid(info, spec.kv_heads):
        first, last = piece.starts[dim], piece.starts[dim] + piece.sizes[dim]
        if first >= stop or last <= start:
            continue
        assert start <= first and last <= stop, f"{piece} is cut by {held}"
        along = slice(first - start, last - start)
        rows, columns = (along, slice(None)) if dim == 0 else (slice(0, view.rows), along)
        rows = slice(view.start + rows.start, view.start + rows.stop)
        found.append(_Piece(first_element(piece, info.shape), rows, columns))
    return found


def sum_pieces(held: Mapping[str, Mapping[str, Tensor]], spec: ModelSpec, layout: Layout, rank: int) -> dict[str, int]:
    """Return by name in staged state the sum mod 2^64 of the checksums of the pieces that a rank holds.

    Args:
        held: by prefix of staged state, then by parameter: contiguous tensors of 1 or 2 dimensions.
    """
    sums, buffer = {}, hash_buffer()
    for prefix, parameters in held.items():
        all_bytes: dict[str, Any] = {}
        for view, pieces in _pieces(spec, layout, rank):
            name = prefix + view.slice.name
            total = 0
            for piece in pieces:
                if view.parameter not in all_bytes:
                    all_bytes[view.parameter] = _bytes_of(parameters[view.parameter])
                part = all_bytes[view.parameter][piece.rows, piece.column_bytes(parameters[view.parameter])]
                total += _hash(part, piece_seed(name, piece.first_element), buffer)
            sums[name] = total % _MODULUS
    return sums


def hash_piece(part: Tensor, seed: int, buffer: np.ndarray) -> int:
    """Return the checksum of a piece as `sum_pieces` computes it, of 1 or 2 dimensions; its rows may lie apart.

    Args:
        buffer: of `hash_buffer`.
    """
    return _hash(_bytes_of(part), seed, buffer)


def hash_buffer() -> np.ndarray:
    """Return room for what has to be laid side by side to be hashed."""
    return np.empty(_HASH_BLOCK_BYTES, dtype=np.uint8)


def _bytes_of(tensor: Tensor) -> Any:
    """Return a tensor as bytes [rows, bytes of a row]: an array where it lies in the host's memory, else a tensor."""
    rows = (tensor if tensor.dim() == 2 else tensor.view(len(tensor), -1)).view(torch.uint8)
    return rows.numpy() if rows.device.type == "cpu" else rows


def _hash(part: Any, seed: int, buffer: np.ndarray) -> int:
    """Return the xxh3_64 of some bytes [rows, bytes of a row], row by row."""
    if isinstance(part, np.ndarray) and part.flags.c_contiguous:
        return xxhash.xxh3_64_intdigest(part, seed)  # type: ignore[arg-type]
    digest = xxhash.xxh3_64(seed=seed)
    for block in _blocks(part, buffer):
        digest.update(block)  # type: ignore[arg-type]
    return digest.intdigest()


def _blocks(part: Any, buffer: np.ndarray) -> Iterator[np.ndarray]:
    """Yield some bytes in order, from few rows at once; each time what came before is overwritten."""
    num_rows, row_bytes = part.shape
    step = max(1, buffer.size // row_bytes)
    for start in range(0, num_rows, step):
        block = part[start : start + step]
        if isinstance(block, Tensor):
            yield block.contiguous().cpu().numpy()
        elif block.size > buffer.size:  # one long row
            yield np.ascontiguousarray(block)
        else:
            room = buffer[: block.size].reshape(block.shape)
            np.copyto(room, block)
            yield room
