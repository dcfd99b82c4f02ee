"""Byte ranges of a file, local or behind fsspec: what all readers of large files stand on."""

from __future__ import annotations

import errno
import os
from typing import Protocol

from storage.urls import local_path, open_filesystem

_RANGE_BYTES = 4 * 2**20  # of one request to an object store; several run at once


class ByteReader(Protocol):
    """An open file that gives byte ranges; reading from several threads is safe."""

    size: int
    is_local: bool

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill the buffer from byte `start` on; OSError when the file is shorter than that."""

    def close(self) -> None:
        """Free what is open."""


def open_bytes(url: str | os.PathLike[str]) -> ByteReader:
    """Open a path or URL for reading byte ranges."""
    path = local_path(url)
    return LocalBytes(path) if path is not None else RemoteBytes(os.fspath(url))


class LocalBytes:
    """Byte ranges of a local file."""

    is_local = True

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self.fd).st_size

    def read_into(self, start: int, buffer: memoryview) -> None:
        done = 0
        while done < len(buffer):
            count = os.preadv(self.fd, [buffer[done:]], start + done)
            if count == 0:
                raise OSError(errno.EIO, f"the file ended at byte {start + done} while it was read")
            done += count

    def close(self) -> None:
        os.close(self.fd)


class RemoteBytes:
    """Byte ranges of an object behind fsspec, fetched several at a time."""

    is_local = False

    def __init__(self, url: str) -> None:
        self.filesystem, self.path = open_filesystem(url)
        self.size = int(self.filesystem.size(self.path))

    def read_into(self, start: int, buffer: memoryview) -> None:
        starts = list(range(start, start + len(buffer), _RANGE_BYTES))
        stops = [min(s + _RANGE_BYTES, start + len(buffer)) for s in starts]
        parts = self.filesystem.cat_ranges([self.path] * len(starts), starts, stops, on_error="raise")
        for part, first, stop in zip(parts, starts, stops, strict=True):
            if isinstance(part, BaseException):  # stores of fsspec differ in whether they raise it themselves
                raise part
            if len(part) != stop - first:
                raise OSError(errno.EIO, f"bytes {first} to {stop} of {self.path} came back as {len(part)} bytes")
            buffer[first - start : stop - start] = part

    def close(self) -> None:
        pass
