"""Small files of one folder, at any URL: listed, read, written and removed whole, with retries where it is remote."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import stat
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from storage.retry import retried
from storage.urls import is_s3, local_path, open_filesystem

MAX_BYTES = 64 * 2**20
_THREADS = 16  # of requests to one store for many files


def list_names(url: str | os.PathLike[str]) -> list[str]:
    """Return the sorted names of what lies directly in a folder, files and folders; none where there is no folder."""
    path = local_path(url)
    if path is not None:
        try:
            return sorted(os.listdir(path))
        except (FileNotFoundError, NotADirectoryError):
            return []
    filesystem, folder = open_filesystem(url)

    def ls() -> list[str]:
        filesystem.invalidate_cache(folder)
        try:
            return filesystem.ls(folder, detail=False)
        except FileNotFoundError:
            return []

    inside = (name.rstrip("/") for name in retried(ls))
    return sorted({posixpath.basename(name) for name in inside if name != folder.rstrip("/")})


def read_file(url: str | os.PathLike[str], *, patient: bool = True) -> bytes:
    """Return a whole file.

    Args:
        url: the file.
        patient: False makes one short attempt only, for what somebody waits for.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it has more than 64 MiB, or is no plain file.
    """
    path = local_path(url)
    if path is not None:
        data = _read_local(path)
    else:
        store = open_filesystem(url, patient=patient)
        data = retried(lambda: _read_object(*store), attempts=4 if patient else 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    return data


def read_files(urls: Sequence[str]) -> list[bytes]:
    """Return several files of one store in order; objects of a remote one are fetched side by side."""
    return _side_by_side(read_file, urls)


def remove_files(urls: Sequence[str]) -> None:
    """Remove several files of one store, those that are there."""
    _side_by_side(remove_file, urls)


def file_exists(url: str | os.PathLike[str]) -> bool:
    """Return whether there is such a file."""
    path = local_path(url)
    if path is not None:
        return os.path.lexists(path)
    filesystem, name = open_filesystem(url)

    def exists() -> bool:
        filesystem.invalidate_cache(posixpath.dirname(name))
        return filesystem.exists(name)

    return retried(exists)


def replace_file(url: str | os.PathLike[str], data: bytes, *, patient: bool = True) -> None:
    """Write a file whole, over an older one: a reader sees the old or the new. Not synced to the disk.

    Args:
        url: the file; its folders are made.
        data: what it holds then.
        patient: False makes one short attempt only, for what is written again soon anyway.
    """
    path = local_path(url)
    if path is None:
        filesystem, name = open_filesystem(url, patient=patient)
        retried(lambda: filesystem.pipe_file(name, data), attempts=4 if patient else 1)
        return
    folder, name = os.path.split(path)
    os.makedirs(folder or ".", exist_ok=True)
    temporary = os.path.join(folder, temporary_name(name))
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def temporary_name(name: str) -> str:
    """Return a new name for a local file that is to become `name`."""
    return f".{name}.{uuid.uuid4().hex}.new"


def remove_file(url: str | os.PathLike[str], *, patient: bool = True) -> None:
    """Remove a file, if it is there; a folder stays. Impatient as in `replace_file`."""
    path = local_path(url)
    if path is not None:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(path)
        return
    filesystem, name = open_filesystem(url, patient=patient)

    def remove() -> None:
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm_file(name)

    retried(remove, attempts=4 if patient else 1)


def remove_folder(url: str | os.PathLike[str]) -> bool:
    """Remove a folder if it is empty, and return whether it is gone; object stores that keep such are asked, too."""
    path = local_path(url)
    if path is not None:
        try:
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                raise
        return not os.path.lexists(path)
    if list_names(url):
        return False
    filesystem, name = open_filesystem(url)
    if is_s3(filesystem):
        retried(lambda: filesystem.rm_file(f"{name.rstrip('/')}/"))  # SeaweedFS keeps folders; others know no such key
    else:
        with contextlib.suppress(OSError, NotImplementedError):
            filesystem.rmdir(name)
    return True


def _read_local(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would be waited for otherwise
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is no plain file")
        return file.read(MAX_BYTES + 1)


def _read_object(filesystem: Any, name: str) -> bytes:
    try:
        return filesystem.cat_file(name, start=0, end=MAX_BYTES + 1)
    except OSError as error:
        # S3 knows no range of an empty object.
        if error.errno != errno.EINVAL or filesystem.size(name) != 0:
            raise
        return b""


def _side_by_side(action: Callable[[str], Any], urls: Sequence[str]) -> list[Any]:
    if len(urls) < 2 or local_path(urls[0]) is not None:
        return [action(url) for url in urls]
    with ThreadPoolExecutor(min(_THREADS, len(urls))) as threads:
        return list(threads.map(action, urls))
