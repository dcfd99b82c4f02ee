"""Byte ranges of a file, local or behind fsspec: what all readers of large files stand on."""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Sequence
from typing import Protocol

from storage.retry import TransientError, retried
from storage.urls import local_path, open_filesystem

_RANGE_BYTES = 8 * 2**20  # of one request to an object store; several run at once, smaller ones cost a quarter more


Run = tuple[int, list[memoryview]]  # where to begin in the file, and what to fill from there on


class ByteReader(Protocol):
    """An open file that gives byte ranges; reading from several threads is safe."""

    size: int
    is_local: bool

    def read_into(self, start: int, *buffers: memoryview) -> None:
        """Fill the buffers, one after the other, from byte `start` on; OSError when the file is shorter than that."""

    def read_runs(self, runs: Sequence[Run]) -> None:
        """Do so for several places; an object store is asked for all of them at once."""

    def close(self) -> None:
        """Free what is open."""


def open_bytes(url: str | os.PathLike[str], *, only_plain: bool = False) -> ByteReader:
    """Open a path or URL for reading byte ranges.

    Args:
        url: of the file.
        only_plain: refuse, on local disk, what is a link, a pipe or anything but an ordinary file.
    """
    path = local_path(url)
    return LocalBytes(path, only_plain=only_plain) if path is not None else RemoteBytes(os.fspath(url))


class LocalBytes:
    """Byte ranges of a local file."""

    is_local = True

    def __init__(self, path: str, *, only_plain: bool = False) -> None:
        # Without O_NONBLOCK a pipe in the place of the file would be waited for.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK if only_plain else 0
        self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
        found = os.fstat(self.fd)
        self.size = found.st_size
        if only_plain and not stat.S_ISREG(found.st_mode):
            self.close()
            raise OSError(errno.EINVAL, "it is no ordinary file", path)

    def read_into(self, start: int, *buffers: memoryview) -> None:
        rest = [buffer for buffer in buffers if buffer]
        while rest:
            count = os.preadv(self.fd, rest, start)
            if count == 0:
                raise OSError(errno.EIO, f"the file ended at byte {start} while it was read")
            start += count
            while rest and count >= len(rest[0]):
                count -= len(rest.pop(0))
            if count:
                rest[0] = rest[0][count:]

    def read_runs(self, runs: Sequence[Run]) -> None:
        for start, buffers in runs:
            self.read_into(start, *buffers)

    def close(self) -> None:
        os.close(self.fd)


class RemoteBytes:
    """Byte ranges of an object behind fsspec, fetched several at a time; what fails on the way is tried again."""

    is_local = False

    def __init__(self, url: str) -> None:
        self.filesystem, self.path = open_filesystem(url)
        # A size from an earlier listing may be that of an object since replaced.
        self.filesystem.invalidate_cache(posixpath.dirname(self.path))
        self.size = int(retried(lambda: self.filesystem.size(self.path)))

    def read_into(self, start: int, *buffers: memoryview) -> None:
        self.read_runs([(start, list(buffers))])

    def read_runs(self, runs: Sequence[Run]) -> None:
        starts: list[int] = []
        stops: list[int] = []
        for start, buffers in runs:
            stop = start + sum(map(len, buffers))
            starts += range(start, stop, _RANGE_BYTES)
            stops += [min(first + _RANGE_BYTES, stop) for first in range(start, stop, _RANGE_BYTES)]
        if starts:
            _scatter(retried(lambda: self._fetch(starts, stops)), [buffer for _, buffers in runs for buffer in buffers])

    def _fetch(self, starts: list[int], stops: list[int]) -> list[bytes]:
        parts = self.filesystem.cat_ranges([self.path] * len(starts), starts, stops, on_error="raise")
        for part, first, stop in zip(parts, starts, stops, strict=True):
            if isinstance(part, BaseException):  # stores of fsspec differ in whether they raise it themselves
                raise part
            if len(part) != stop - first:
                raise TransientError(
                    errno.EIO, f"bytes {first} to {stop} of {self.path} came back as {len(part)} bytes"
                )
        return parts

    def close(self) -> None:
        pass


def _scatter(parts: list[bytes], buffers: Sequence[memoryview]) -> None:
    """Copy the parts, end to end, into the buffers, end to end; both have the same length."""
    sources = iter(parts)
    source = memoryview(b"")
    for buffer in buffers:
        done = 0
        while done < len(buffer):
            source = source or memoryview(next(sources))
            count = min(len(source), len(buffer) - done)
            buffer[done : done + count] = source[:count]
            source, done = source[count:], done + count
