"""Large local files that appear whole, and on the disk, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WholeFile:
    """A file of known size that is written front to back under another name and renamed once it is on the disk.

    What other programs see under `path` is the old file (if any) or the complete new one. A name that begins with a
    dot and ends with `.writing` is the leftover of a killed process.

    Raises:
        OSError: as the system says; without room, with a sentence that names what was needed and what is free.
    """

    def __init__(self, path: str, num_bytes: int) -> None:
        folder, name = os.path.split(path)
        os.makedirs(folder or ".", exist_ok=True)
        self.path, self.num_bytes, self.position = path, num_bytes, 0
        self._temporary = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.writing")
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

    def write(self, block: bytes | memoryview) -> None:
        """Append bytes."""
        rest = memoryview(block)
        try:
            while rest:
                count = os.pwrite(self._fd, rest, self.position)
                rest, self.position = rest[count:], self.position + count
        except OSError as error:
            raise self._explain(error) from None

    def finish(self) -> None:
        """Wait until the bytes are on the disk, then give the file its name."""
        assert self.position == self.num_bytes, (self.path, self.position, self.num_bytes)
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._explain(error) from None
        os.close(self._fd)
        self._fd = -1
        os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Remove what was written; nothing happens after `finish`."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def _explain(self, error: OSError) -> OSError:
        if error.errno not in _NO_ROOM:
            return error
        free = os.statvfs(os.path.dirname(self.path) or ".")
        return OSError(
            error.errno,
            f"no room for {self.path}: it needs {self.num_bytes} bytes, {free.f_bavail * free.f_frsize} are free; "
            "free some or move staging.root",
        )
