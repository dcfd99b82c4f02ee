"""Checksums of pieces of tensors: the same number on every layout, and another one for bytes in the wrong place.

A piece's checksum is the xxh3_64 of its bytes (row-major, little-endian), seeded by the tensor's name and by where the
piece begins in the whole tensor. Summed over a tensor's pieces mod 2^64 it is the tensor's logical checksum, which
needs no gathering and doesn't depend on who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from storage.slices import TensorSlice


def first_element(part: TensorSlice, shape: Sequence[int]) -> int:
    """Return the row-major index, in the whole tensor of `shape`, of a slice's first element."""
    index = 0
    for start, extent in zip(part.starts, shape, strict=True):
        index = index * extent + start
    return index


def piece_seed(name: str, first_element: int) -> int:
    """Return the seed of a piece's checksum: xxh3_64 of the UTF-8 text `<name>@<first_element>`."""
    return xxhash.xxh3_64_intdigest(f"{name}@{first_element}".encode())


class PieceHash:
    """The checksum of one piece, fed with its bytes in order; blocks above 100 kB are hashed without Python's lock."""

    def __init__(self, part: TensorSlice, shape: Sequence[int]) -> None:
        self._hash = xxhash.xxh3_64(seed=piece_seed(part.name, first_element(part, shape)))
        self.update = self._hash.update

    def hexdigest(self) -> str:
        """Return 16 lower-case hexadecimal digits."""
        return self._hash.hexdigest()
