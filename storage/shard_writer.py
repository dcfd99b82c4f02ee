"""One shard of a staged set, written straight from live tensors: an ordinary safetensors file, and its record."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from storage.checksums import PieceHash
from storage.manifest import FILE, GROUP, NAME
from storage.retry import retried
from storage.safetensors_header import DTYPE_NAMES, Header, build_header
from storage.shard_record import Piece, ShardRecord, TensorMeta, cut_dim, follows, key_of
from storage.slices import TensorSlice
from storage.tensor_bytes import byte_blocks
from storage.urls import join_url, local_path, open_filesystem
from storage.whole_file import WholeFile

BLOCK_BYTES = 2**19  # hashed and written while it is in the processor's cache
PUT_BYTES = 80 * 2**20  # of an object that is put at once; a larger one goes in parts
PART_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _Placed:
    part: TensorSlice
    key: str
    start: int
    stop: int
    tensor: Tensor


class ShardWriter:
    """Collects slices of one group's tensors and writes them as one file of a staged set.

    Extra memory: BLOCK_BYTES for tensors that are strided or not on the CPU; for an object store the shard itself up to
    PUT_BYTES, or two parts of a larger one.
    """

    def __init__(self, folder_url: str | os.PathLike[str], *, group: str, file: str) -> None:
        """Remember where the shard goes; nothing is touched yet.

        Args:
            folder_url: the set's folder, a path or any fsspec URL; local ones are made.
            group: which tensors these are, such as "actor.training".
            file: plain name in the folder that ends with `.safetensors`.
        """
        assert GROUP.fullmatch(group) and FILE.fullmatch(file), (group, file)
        self.url, self.group, self.file = join_url(folder_url, file), group, file
        self._metas: dict[str, TensorMeta] = {}
        self._added: dict[str, list[tuple[TensorSlice, Tensor]]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors added so far."""
        return sum(tensor.nbytes for held in self._added.values() for _, tensor in held)

    def add(self, part: TensorSlice, shape: tuple[int, ...], tensor: Tensor) -> None:
        """Add one piece: cell `part`, cut in at most one dimension, of a tensor of `shape`.

        The tensor has the piece's sizes and any dtype, which is the one stored, and device. It is read by
        `finish_shard`, not before: until then it must not change. A slice without elements stores no bytes.
        """
        assert tuple(tensor.shape) == part.sizes and NAME.fullmatch(part.name), (part, tuple(tensor.shape))
        cut_dim(part, shape)
        meta = TensorMeta(DTYPE_NAMES[tensor.dtype], tuple(shape))
        assert self._metas.setdefault(part.name, meta) == meta, (part, meta, self._metas[part.name])
        if part.num_elements:
            self._added.setdefault(part.name, []).append((part, tensor))

    def finish_shard(self) -> ShardRecord:
        """Write the shard and return its record; the file is complete and durable, or not there.

        It may be called again after an error.

        Raises:
            OSError: it can't be written; what was begun is removed.
        """
        text, header, placed = self._place()
        path = local_path(self.url)
        if path is not None:
            pieces = self._write_local(path, text, header.file_bytes, placed)
        elif header.file_bytes <= PUT_BYTES:
            pieces = self._put(text, header.file_bytes, placed)
        else:
            pieces = retried(lambda: self._put_in_parts(text, placed))
        return ShardRecord(self.group, self.file, header.file_bytes, header.checksum, dict(self._metas), pieces)

    def abandon(self) -> None:
        """Let go of the tensors; a file that `finish_shard` completed stays."""
        self._added.clear()
        self._metas.clear()

    def _place(self) -> tuple[bytes, Header, list[_Placed]]:
        """Decide on the file: large elements first, so that all are aligned; adjacent rows of a tensor in one key."""
        names = sorted(self._added, key=lambda name: -self._added[name][0][1].element_size())
        runs = [(name, run) for name in names for run in self._runs(name)]
        keys = {key_of(name, self._metas[name].shape, run[0][0], run[-1][0]): (name, run) for name, run in runs}
        assert len(keys) == len(runs), "a piece was added twice"
        described = {}
        for key, (_, run) in keys.items():
            rows = sum(part.sizes[0] for part, _ in run) if run[0][0].sizes else 0
            described[key] = (run[0][1].dtype, (rows, *run[0][0].sizes[1:]) if run[0][0].sizes else ())
        text, header = build_header(described, {"format": "pt", "group": self.group})
        placed = []
        for key, (_, run) in keys.items():
            position = header.entries[key].start
            for part, tensor in run:
                placed.append(_Placed(part, key, position, position + tensor.nbytes, tensor))
                position += tensor.nbytes
        return text, header, placed

    def _runs(self, name: str) -> Iterator[list[tuple[TensorSlice, Tensor]]]:
        shape = self._metas[name].shape
        run: list[tuple[TensorSlice, Tensor]] = []
        for part, tensor in sorted(self._added[name], key=lambda item: item[0].starts):
            if run and not follows(part, run[-1][0], shape):
                yield run
                run = []
            run.append((part, tensor))
        yield run

    def _write_pieces(self, placed: list[_Placed], write: Callable[[memoryview], None]) -> tuple[Piece, ...]:
        """Hand the bytes of all pieces to `write`, front to back, and return the pieces with their checksums."""
        buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        pieces = []
        for place in placed:
            digest = PieceHash(place.part, self._metas[place.part.name].shape)
            for block in byte_blocks(place.tensor, buffer):
                digest.update(block)
                write(block)
            pieces.append(Piece(place.part, place.key, place.start, place.stop, digest.hexdigest()))
        return tuple(pieces)

    def _write_local(self, path: str, text: bytes, num_bytes: int, placed: list[_Placed]) -> tuple[Piece, ...]:
        file = WholeFile(path, num_bytes)
        try:
            file.write(text)
            pieces = self._write_pieces(placed, file.write)
            file.finish()
        finally:
            file.discard()
        return pieces

    def _put(self, text: bytes, num_bytes: int, placed: list[_Placed]) -> tuple[Piece, ...]:
        data, position = bytearray(num_bytes), len(text)
        data[:position] = text

        def append(block: memoryview) -> None:
            nonlocal position
            data[position : position + len(block)] = block
            position += len(block)

        pieces = self._write_pieces(placed, append)
        filesystem, name = open_filesystem(self.url)
        retried(lambda: filesystem.pipe_file(name, data))
        return pieces

    def _put_in_parts(self, text: bytes, placed: list[_Placed]) -> tuple[Piece, ...]:
        filesystem, name = open_filesystem(self.url)
        file = filesystem.open(name, "wb", block_size=PART_BYTES, autocommit=False)
        try:
            file.write(text)
            pieces = self._write_pieces(placed, file.write)
            file.close()
            file.commit()
        except BaseException:
            with contextlib.suppress(Exception):  # the error that counts is the one on its way
                file.discard()
            file.closed = True  # else its end of life would upload the rest
            raise
        return pieces
