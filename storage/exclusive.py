"""Files that exactly one writer creates: the loser is told, on disk and in object stores."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import re
import threading
import uuid
from typing import Any

from fsspec import AbstractFileSystem

from storage.retry import retried
from storage.small_files import temporary_name
from storage.urls import is_s3, local_path, open_filesystem

_WRITER = "nereus-writer"  # metadata of an object: who put it, so that a lost answer is no lost race
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{32}\.new")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
_in_memory = threading.Lock()  # fsspec's memory store looks first and writes then


def create_exclusively(url: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file whole, its folders included; it is durable when this returns.

    On a local disk: a synced temporary file, linked to its name, and a synced folder, so nobody ever sees a part of it.

    Raises:
        FileExistsError: it is there already, or another writer was faster.
    """
    path = local_path(url)
    if path is None:
        create_object(*open_filesystem(url), data)
        return
    folder, name = os.path.split(path)
    make_folder(folder or ".")
    temporary = os.path.join(folder, temporary_name(name))
    try:
        _write_new(temporary, data)
        _link(temporary, path, data)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    sync_folder(folder or ".")
    remove_leftovers(folder, name)


def remove_leftovers(folder: str, name: str | None = None) -> None:
    """Remove the temporary files of writers that were killed or too slow: those whose file is there.

    Args:
        folder: a local folder.
        name: of the one file to clean up after; None for all.
    """
    for leftover in os.listdir(folder or "."):
        match = _TEMPORARY.fullmatch(leftover)
        if match and name in (None, match[1]) and os.path.lexists(os.path.join(folder, match[1])):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, leftover))


def make_folder(path: str) -> None:
    """Make a local folder and those above it, each of them on the disk when this returns."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        os.makedirs(folder, exist_ok=True)
        sync_folder(os.path.dirname(folder) or ".")


def sync_folder(path: str) -> None:
    """Bring the names in a local folder to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that can't, such as some FUSE ones
            raise
    finally:
        os.close(fd)


def create_object(filesystem: AbstractFileSystem, name: str, data: bytes) -> None:
    """Put a new object; a lost answer to a put that had arrived makes no loser of its writer.

    Raises:
        FileExistsError: it is there already, or another writer was faster.
    """
    # botocore asks again by itself, and is told then that the object exists: its metadata say whether it is ours.
    writer = uuid.uuid4().hex if is_s3(filesystem) else None
    options: dict[str, Any] = {} if writer is None else {"Metadata": {_WRITER: writer}}
    lock = _in_memory if "memory" in filesystem.protocol else contextlib.nullcontext()
    failed_before = False

    def put() -> None:
        nonlocal failed_before
        try:
            with lock:
                filesystem.pipe_file(name, data, mode="create", **options)
        except Exception as error:
            again, failed_before = failed_before, True
            taken = _says_taken(filesystem, name, error)
            if taken and _is_ours(filesystem, name, data, writer, again):
                return
            if taken and not isinstance(error, FileExistsError):
                raise FileExistsError(errno.EEXIST, "it exists already", name) from error
            raise

    retried(put)


def _write_new(path: str, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _link(temporary: str, path: str, data: bytes) -> None:
    try:
        os.link(temporary, path)
    except FileNotFoundError:
        if not os.path.lexists(path):
            raise
        raise FileExistsError(errno.EEXIST, "it exists already", path) from None  # its writer has cleaned up after us
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # A file system without links: still one winner, but a reader may see a part.
        try:
            _write_new(path, data)
        except FileExistsError:
            raise
        except BaseException:
            os.unlink(path)
            raise


def _says_taken(filesystem: AbstractFileSystem, name: str, error: Exception) -> bool:
    if isinstance(error, FileExistsError):
        return True
    # s3fs says "taken" by EINVAL with some servers; EINVAL has other causes as well, such as no such bucket.
    if not isinstance(error, OSError) or error.errno != errno.EINVAL:
        return False
    filesystem.invalidate_cache(posixpath.dirname(name))
    return filesystem.exists(name)


def _is_ours(filesystem: AbstractFileSystem, name: str, data: bytes, writer: str | None, again: bool) -> bool:
    """Return whether the object there comes from this very call, whose answer was lost."""
    if writer is not None:
        return filesystem.metadata(name).get(_WRITER) == writer
    if not again:
        return False
    filesystem.invalidate_cache(posixpath.dirname(name))
    return filesystem.cat_file(name) == data
