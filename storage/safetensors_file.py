"""Slices of tensors out of and into safetensors files, in bounded memory; local paths and fsspec URLs."""

from __future__ import annotations

import errno
import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from storage.byte_reader import LocalBytes, open_bytes
from storage.safetensors_header import Header, TensorEntry, build_header, check_header_length, parse_header
from storage.slices import TensorSlice
from storage.tensor_bytes import bytes_of

BLOCK_BYTES = 16 * 2**20  # most bytes of a file that are held at a time


@dataclass(frozen=True)
class _Rows:
    """A slice seen as rows of a matrix in the file; sizes and positions in bytes."""

    first: int  # of the first element in the file
    count: int
    width: int  # wanted bytes of a row
    pitch: int  # from one row to the next

    @property
    def is_contiguous(self) -> bool:
        return self.width == self.pitch or self.count == 1

    def blocks(self) -> list[tuple[int, int]]:
        """Return (start, stop) rows that span at most BLOCK_BYTES (one row at least)."""
        step = max(1, BLOCK_BYTES // max(1, self.pitch))
        return [(row, min(row + step, self.count)) for row in range(0, self.count, step)]


def _rows_of(entry: TensorEntry, part: TensorSlice) -> _Rows:
    assert len(part.sizes) == len(entry.shape), (entry, part)
    assert all(stop <= size for stop, size in zip(part.stops, entry.shape, strict=True)), (entry, part)
    assert part.sizes[2:] == entry.shape[2:], f"only dimensions 0 and 1 can be cut: {part} of {entry.shape}"
    item = entry.torch_dtype.itemsize
    if not part.sizes:
        return _Rows(entry.start, 1, item, item)
    pitch = math.prod(entry.shape[1:]) * item
    column = part.starts[1] * math.prod(entry.shape[2:]) * item if len(part.sizes) > 1 else 0
    return _Rows(entry.start + part.starts[0] * pitch + column, part.sizes[0], math.prod(part.sizes[1:]) * item, pitch)


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.unsqueeze(0)


class SafetensorsFile:
    """One safetensors file, open for reading slices.

    Memory: at most BLOCK_BYTES (or one row of a tensor, if that is more) beside the tensors that are filled. Reading
    from several threads at once is safe. `bytes_read` counts the bytes of tensors fetched so far.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        """Open the file and check its header.

        Raises:
            ValueError: the header is not to be trusted (see `parse_header`).
            OSError: the file can't be read.
        """
        self.url = os.fspath(url)
        self._bytes = open_bytes(self.url)
        self.bytes_read = 0
        try:
            self.header = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> Header:
        size = self._bytes.size
        prefix = bytearray(min(8, size))
        self._bytes.read_into(0, memoryview(prefix))
        data = bytearray(8 + check_header_length(bytes(prefix), size, self.url))
        self._bytes.read_into(0, memoryview(data))
        return parse_header(bytes(data), size, self.url)

    def read(self, part: TensorSlice, out: Tensor) -> None:
        """Fill `out` (shape `part.sizes`, any dtype and device) with a slice of the tensor `part.name`.

        Cuts are possible in dimensions 0 and 1. Row ranges are read as they lie. A range of columns is copied out of
        a memory map of a local file; from a remote one whole rows are fetched, since a request a row would be slower.
        """
        entry = self.header.entries[part.name]
        assert tuple(out.shape) == part.sizes, (tuple(out.shape), part)
        if part.num_elements == 0:
            return
        rows, target = _rows_of(entry, part), _as_rows(out)
        is_aligned = rows.first % entry.torch_dtype.itemsize == 0  # of foreign files not always
        mappable = self._bytes.is_local and is_aligned and not rows.is_contiguous
        read_block = self._map_columns if mappable else self._read_rows
        for start, stop in rows.blocks():
            read_block(entry, rows, start, stop, target[start:stop])

    def _read_rows(self, entry: TensorEntry, rows: _Rows, start: int, stop: int, out: Tensor) -> None:
        first = rows.first + start * rows.pitch
        length = (stop - start - 1) * rows.pitch + rows.width
        self.bytes_read += length
        direct = out.dtype == entry.torch_dtype and out.device.type == "cpu" and out.is_contiguous()
        if rows.is_contiguous and direct:
            self._bytes.read_into(first, bytes_of(out))
            return
        buffer = torch.empty(length, dtype=torch.uint8)
        self._bytes.read_into(first, bytes_of(buffer))
        item = entry.torch_dtype.itemsize
        shape, strides = (stop - start, rows.width // item), (rows.pitch // item, 1)
        out.copy_(buffer.view(entry.torch_dtype).as_strided(shape, strides).view(out.shape))

    def _map_columns(self, entry: TensorEntry, rows: _Rows, start: int, stop: int, out: Tensor) -> None:
        """Copy columns out of a map of just these rows, so that resident memory stays bounded by one block."""
        assert isinstance(self._bytes, LocalBytes)
        first = rows.first + start * rows.pitch
        length = (stop - start - 1) * rows.pitch + rows.width
        base = first - first % mmap.ALLOCATIONGRANULARITY
        item = entry.torch_dtype.itemsize
        # ACCESS_COPY: torch wants a writable buffer, and the file must never be written through it.
        window = mmap.mmap(self._bytes.fd, first - base + length, access=mmap.ACCESS_COPY, offset=base)
        try:
            flat = torch.frombuffer(window, dtype=entry.torch_dtype, count=length // item, offset=first - base)
            shape, strides = (stop - start, rows.width // item), (rows.pitch // item, 1)
            out.copy_(flat.as_strided(shape, strides).view(out.shape))
            self.bytes_read += (stop - start) * rows.width
            del flat  # a map can't be closed while a tensor looks into it
        finally:
            window.close()

    def close(self) -> None:
        self._bytes.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def create_file(
    path: str, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> Header:
    """Create a local file with its header and room for its tensors, which `SliceWriter`s fill later.

    The room is reserved on the disk, so that a full disk is found now and not after hours.

    Raises:
        OSError: the file exists, or there is no room.
    """
    data, header = build_header(tensors, metadata)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.pwrite(fd, data, 0)
        try:
            os.posix_fallocate(fd, 0, header.file_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            os.ftruncate(fd, header.file_bytes)
    finally:
        os.close(fd)
    return header


class SliceWriter:
    """Writes slices into a local file made by `create_file`; several processes may write disjoint slices at once."""

    def __init__(self, path: str) -> None:
        with SafetensorsFile(path) as file:
            self.header = file.header
        self._fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, part: TensorSlice, tensor: Tensor) -> int:
        """Write `tensor` (shape `part.sizes`, any float dtype and device) in the file's dtype; return bytes written."""
        entry = self.header.entries[part.name]
        assert tuple(tensor.shape) == part.sizes, (tuple(tensor.shape), part)
        if part.num_elements == 0:
            return 0
        rows, source = _rows_of(entry, part), _as_rows(tensor.detach())
        for start, stop in rows.blocks():
            block = source[start:stop].to(device="cpu", dtype=entry.torch_dtype).contiguous()
            first = rows.first + start * rows.pitch
            data = bytes_of(block)
            if rows.is_contiguous:
                self._write_at(first, data)
                continue
            # One call a row: a shared memory map would be quicker, but turns a full disk into SIGBUS and is not
            # coherent when ranks on several hosts write into one page of a network file system.
            for row in range(stop - start):
                self._write_at(first + row * rows.pitch, data[row * rows.width : (row + 1) * rows.width])
        return rows.count * rows.width

    def _write_at(self, position: int, data: memoryview) -> None:
        while data:
            count = os.pwrite(self._fd, data, position)
            data, position = data[count:], position + count

    def close(self) -> None:
        """Wait until what was written is on the disk."""
        try:
            os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
