"""What is known of one file of staged state: its tensors, and where each piece of them lies; no torch, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from storage.slices import TensorSlice

ITEM_BYTES = {  # of an element, by safetensors' name of its dtype
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1},
    **{"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1},
}


class DamagedState(ValueError):
    """Staged state that must not be loaded; one sentence: the file, what is wrong, the mend."""


def damage(where: str, what: str) -> DamagedState:
    """Return the error that says what is wrong with a file."""
    return DamagedState(f"{where} is damaged: {what}; use another commit or write it again.")


@dataclass(frozen=True)
class Piece:
    """One cell of a tensor's grid: the unit of reading and of checksums. It lies in bytes [start, stop) of its file.

    Example: rows 192..383 of a float32 matrix [576, 576], the second of three pieces of the key "w" that begins at
    byte 1024: `Piece(TensorSlice("w", (192, 0), (192, 576)), "w", 443392, 885760, "0123456789abcdef")`.
    """

    part: TensorSlice
    key: str  # the shard's own name for the run of pieces that this one belongs to
    start: int
    stop: int
    checksum: str  # 16 hexadecimal digits, see storage/checksums.py


@dataclass(frozen=True)
class TensorMeta:
    """The whole tensor, wherever its pieces lie; `dtype` is safetensors' name of it ("F32")."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class ShardRecord:
    """One file of a set: tensors of one group, by canonical name, and those of their pieces that lie in the file.

    Pieces are in the order of their bytes; a tensor without elements has none. `header_checksum` is the xxh3_128 of
    all bytes before the first piece.
    """

    group: str
    file: str
    num_bytes: int
    header_checksum: str
    tensors: Mapping[str, TensorMeta]
    pieces: tuple[Piece, ...]

    @property
    def header_bytes(self) -> int:
        """Bytes before the first piece."""
        return self.pieces[0].start if self.pieces else self.num_bytes


def cut_dim(part: TensorSlice, shape: tuple[int, ...]) -> int | None:
    """Return the one dimension in which a slice is less than the tensor, None where it is the whole.

    Raises:
        ValueError: it is cut in several dimensions, which the format doesn't know.
    """
    if part.sizes == shape:
        return None
    cut = [dim for dim, (size, extent) in enumerate(zip(part.sizes, shape, strict=True)) if size != extent]
    if len(cut) > 1:
        raise ValueError(f"the slice {part.starts} of sizes {part.sizes} is cut in more than one dimension of {shape}")
    return cut[0]


def key_of(name: str, shape: tuple[int, ...], first: TensorSlice, last: TensorSlice) -> str:
    """Return the key of a run of pieces of one tensor, given its first and its last piece."""
    dim = cut_dim(first, shape)
    if dim is None or (first.starts[dim] == 0 and last.stops[dim] == shape[dim]):
        return name
    return f"{name}@{first.starts[dim]}"


def follows(part: TensorSlice, before: TensorSlice, shape: tuple[int, ...]) -> bool:
    """Return whether a piece's bytes go on, in one key, where those of another piece of the tensor end."""
    return cut_dim(part, shape) == cut_dim(before, shape) == 0 and part.starts[0] == before.stops[0]
