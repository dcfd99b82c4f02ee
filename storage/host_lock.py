"""A lock that one process of this machine can hold for a URL, and that the system frees when the process dies."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import tempfile

from fsspec.implementations.memory import MemoryFileSystem

from storage.exclusive import make_folder
from storage.urls import join_url, local_path, open_filesystem

_UNSUPPORTED = (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


class LockHeld(Exception):
    """A living process holds the lock."""


class HostLock:
    """An flock on a file: beside the run on a local disk, for other stores in a folder of the user for temporary files.

    `identity` names the kernel and the file: equal identities mean that two processes have met at one lock, so that
    who has it knows that the other is dead. It is None where the file system knows no locks.
    """

    def __init__(self, path: str, fd: int, identity: list[str | int] | None) -> None:
        self.path = path
        self.identity = identity
        self._fd = fd

    @classmethod
    def acquire(cls, run_url: str) -> HostLock:
        """Take the lock of a run.

        Raises:
            LockHeld: another process, or another holder in this one, has it.
            OSError: its file can't be made.
        """
        path = _lock_path(run_url)
        make_folder(os.path.dirname(path))
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise LockHeld(path) from None
            except OSError as error:
                os.close(fd)
                if error.errno not in _UNSUPPORTED:
                    raise
                return cls(path, -1, None)
            if _is_at(path, fd):  # else its last holder has removed it between our open and our lock
                return cls(path, fd, _identity(fd))
            os.close(fd)

    def release(self) -> None:
        """Free the lock and remove its file. Doing it twice is safe."""
        if self._fd < 0:
            return
        if _is_at(self.path, self._fd):
            os.unlink(self.path)  # while it is held: who opens it now finds another file at the path and tries again
        os.close(self._fd)
        self._fd = -1


def _is_at(path: str, fd: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _identity(fd: int) -> list[str | int] | None:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        return None
    status = os.fstat(fd)
    return [boot, status.st_dev, status.st_ino]


def _lock_path(run_url: str) -> str:
    path = local_path(run_url)
    if path is not None:
        return join_url(path, "journal/driver.lock")
    filesystem, inside = open_filesystem(run_url)
    place = [type(filesystem).__name__, str(getattr(filesystem, "endpoint_url", "")), inside.strip("/")]
    if isinstance(filesystem, MemoryFileSystem):
        place.append(str(os.getpid()))
    name = hashlib.sha256("\n".join(place).encode()).hexdigest()[:32]
    return os.path.join(_own_folder(), f"{name}.lock")


def _own_folder() -> str:
    """Return a folder for locks that nobody else can write."""
    path = os.path.join(tempfile.gettempdir(), f"nereus-{os.getuid()}")
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.stat(path, follow_symlinks=False)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(
                errno.EPERM, f"{path} is not a folder that only this user can write; remove it or set TMPDIR"
            ) from None
    return path
