"""One shard of a staged set, open for reading; checked against its manifest, whatever the file says of itself."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import xxhash
from torch import Tensor

from storage.byte_reader import ByteReader, Run, open_bytes
from storage.checksums import PieceHash
from storage.errors import hide_credentials
from storage.safetensors_header import DTYPES
from storage.shard_record import ITEM_BYTES, Piece, ShardRecord, TensorMeta, damage
from storage.slices import TensorSlice
from storage.tensor_bytes import bytes_of, copy_elements, lies_in_order
from storage.urls import join_url, local_path

_MAX_SEGMENTS = 512  # of one system call, which takes 1,024


@dataclass(frozen=True)
class Target:
    """A wanted slice, and the tensor (shape `part.sizes`, any dtype and device) that it goes to."""

    part: TensorSlice
    out: Tensor

    @functools.cached_property
    def memory(self) -> memoryview | None:
        """The tensor's memory, if it lies in order."""
        return bytes_of(self.out) if lies_in_order(self.out) else None


@dataclass(frozen=True)
class PieceRead:
    """A piece of which the common parts with some targets are wanted; without targets it is only verified."""

    piece: Piece
    meta: TensorMeta
    targets: tuple[Target, ...]

    def direct_memory(self) -> memoryview | None:
        """Return the memory of the target if the piece's bytes belong there as they are, else None."""
        if len(self.targets) != 1:
            return None
        (target,) = self.targets
        part, outer = self.piece.part, target.part
        if target.memory is None or target.out.dtype != DTYPES[self.meta.dtype]:
            return None
        if part.starts[1:] != outer.starts[1:] or part.sizes[1:] != outer.sizes[1:]:  # not whole rows of the target
            return None
        first = part.starts[0] - outer.starts[0] if part.sizes else 0
        if first < 0 or (part.sizes and first + part.sizes[0] > outer.sizes[0]):
            return None
        num_bytes = self.piece.stop - self.piece.start
        start = first * (num_bytes // part.sizes[0]) if part.sizes else 0
        return target.memory[start : start + num_bytes]

    def copy(self, block: TensorSlice, data: Tensor) -> None:
        """Copy the elements of one block of the piece to all targets that want them."""
        held = data.view(DTYPES[self.meta.dtype]).view(block.sizes)
        for target in self.targets:
            common = block.intersect(target.part)
            if common is not None:
                copy_elements(target.out[common.within(target.part)], held[common.within(block)])


@dataclass
class _Segment:
    """Some bytes of a piece, in memory of the target or, as the elements `block`, in a buffer."""

    read: PieceRead
    start: int
    memory: memoryview
    block: TensorSlice | None = None
    data: Tensor | None = None


def open_staged(url: str) -> ByteReader:
    """Open a file of a set, never what a link leads to.

    Raises:
        DamagedState: it is missing, or no ordinary file.
        OSError: it can't be reached.
    """
    try:
        return open_bytes(url, only_plain=True)
    except FileNotFoundError:
        raise damage(hide_credentials(url), "the file is missing") from None
    except OSError as error:
        if local_path(url) is None or error.errno not in (errno.ELOOP, errno.EINVAL, errno.ENXIO):
            raise
        raise damage(hide_credentials(url), "it is a link, a pipe or a folder instead of a file") from None


class ShardReader:
    """One shard, open; its size and header are those of the record. Reading from several threads is safe.

    Raises:
        DamagedState: the file is missing, is no ordinary file, or has another size or header.
        OSError: it can't be reached.
    """

    def __init__(self, folder_url: str | os.PathLike[str], record: ShardRecord) -> None:
        url = join_url(folder_url, record.file)
        self.record, self.where = record, hide_credentials(url)
        self._bytes = open_staged(url)
        try:
            self._check()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        if self._bytes.size != self.record.num_bytes:
            raise damage(self.where, f"it has {self._bytes.size} bytes, but its manifest says {self.record.num_bytes}")
        header = bytearray(self.record.header_bytes)
        self._read([(0, [memoryview(header)])])
        if xxhash.xxh3_128_hexdigest(header) != self.record.header_checksum:
            raise damage(self.where, "its header doesn't match its checksum")
        self.header = bytes(header)

    def read(self, reads: Sequence[PieceRead], buffer: Tensor) -> None:
        """Read pieces, in the order of their bytes, into their targets, and verify them.

        Whole pieces are read; those that lie side by side in one go. Bytes that belong to a target as they are go
        straight into it, all others through `buffer` (uint8, on the CPU), whose size is also what is read at a time.

        Raises:
            DamagedState: a piece doesn't match its checksum (its bytes may be in the targets already), or the local
                disk can't read it.
            OSError: it can't be reached.
        """
        digest: PieceHash | None = None
        for segments in _batches(reads, buffer):
            self._read(_runs_of(segments))
            for segment in segments:
                piece = segment.read.piece
                if digest is None:
                    digest = PieceHash(piece.part, segment.read.meta.shape)
                digest.update(segment.memory)
                if segment.block is not None and segment.data is not None:
                    segment.read.copy(segment.block, segment.data)
                if segment.start + len(segment.memory) == piece.stop:
                    self._compare(piece, digest)
                    digest = None

    def _compare(self, piece: Piece, digest: PieceHash) -> None:
        if digest.hexdigest() != piece.checksum:
            raise damage(
                self.where,
                f"the piece of tensor {piece.part.name!r} at {piece.part.starts} (bytes {piece.start} to {piece.stop}) "
                "doesn't match its checksum",
            )

    def _read(self, runs: Sequence[Run]) -> None:
        try:
            self._bytes.read_runs(runs)
        except OSError as error:
            if not self._bytes.is_local or error.errno != errno.EIO:
                raise
            raise damage(self.where, f"it can't be read at or behind byte {runs[0][0]}") from error

    def close(self) -> None:
        self._bytes.close()


def _batches(reads: Sequence[PieceRead], buffer: Tensor) -> Iterator[list[_Segment]]:
    """Yield segments in batches of at most the buffer's size."""
    limit = buffer.numel()
    batch: list[_Segment] = []
    used = 0
    for read in reads:
        for start, length, held in _cuts(read, limit):
            used = -(-used // 8) * 8  # so that every element of the buffer is aligned
            if batch and (used + length > limit or len(batch) == _MAX_SEGMENTS):
                yield batch
                batch, used = [], 0
            if isinstance(held, TensorSlice):
                data = buffer[used : used + length]
                batch.append(_Segment(read, start, bytes_of(data), held, data))
            else:
                batch.append(_Segment(read, start, held))
            used += length
    if batch:
        yield batch


def _runs_of(segments: Sequence[_Segment]) -> list[Run]:
    """Return the places of segments in their file, those that lie side by side as one."""
    runs: list[Run] = []
    position = -1
    for segment in segments:
        if segment.start != position:
            runs.append((segment.start, []))
        runs[-1][1].append(segment.memory)
        position = segment.start + len(segment.memory)
    return runs


def _cuts(read: PieceRead, limit: int) -> Iterator[tuple[int, int, memoryview | TensorSlice]]:
    """Yield (first byte, number of bytes, memory of the target or elements for the buffer), front to back."""
    position, memory = read.piece.start, read.direct_memory()
    if memory is not None:
        for start in range(0, len(memory), limit):
            part = memory[start : start + limit]
            yield position + start, len(part), part
        return
    item = ITEM_BYTES[read.meta.dtype]
    for block in read.piece.part.blocks(limit // item):
        yield position, block.num_elements * item, block
        position += block.num_elements * item
