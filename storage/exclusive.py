"""Files that exactly one writer creates: the loser is told, on disk and in object stores."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import posixpath
import threading
import uuid
from typing import Any

from fsspec import AbstractFileSystem

from storage.retry import retried
from storage.urls import local_path, open_filesystem

_WRITER = "nereus-writer"  # metadata of an object: who put it, so that a lost answer is no lost race
_in_memory = threading.Lock()  # fsspec's memory store looks first and writes then


def create_exclusively(url: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file whole, its folders included; it is on the disk when this returns.

    Raises:
        FileExistsError: it is there already, or another writer was faster.
    """
    path = local_path(url)
    if path is None:
        create_object(*open_filesystem(url), data)
        return
    folder = os.path.dirname(path) or "."
    make_folder(folder)
    temporary = os.path.join(folder, f".{os.path.basename(path)}.{uuid.uuid4().hex}.new")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)
    except FileNotFoundError:
        if os.path.lexists(path):  # the winner has removed our temporary file
            raise FileExistsError(errno.EEXIST, "it exists already", path) from None
        raise
    finally:
        _unlink(temporary)
    sync_folder(folder)
    remove_losers(path)


def remove_losers(path: str) -> None:
    """Remove what killed or slower writers of an existing local file have left beside it."""
    folder, name = os.path.split(path)
    for temporary in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(name)}.*.new")):
        _unlink(temporary)


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
    """Put a new object; an answer that was lost on the way doesn't make a winner a loser.

    Raises:
        FileExistsError: it is there already, or another writer was faster.
    """
    protocols = filesystem.protocol if isinstance(filesystem.protocol, tuple) else (filesystem.protocol,)
    writer = uuid.uuid4().hex if "s3" in protocols else None
    options: dict[str, Any] = {} if writer is None else {"Metadata": {_WRITER: writer}}
    failed_before = False

    def put() -> None:
        nonlocal failed_before
        try:
            with _in_memory if "memory" in protocols else contextlib.nullcontext():
                filesystem.pipe_file(name, data, mode="create", **options)
        except FileExistsError:
            if not _is_ours(filesystem, name, data, writer, failed_before):
                raise
        except OSError as error:
            # s3fs says "taken" by EINVAL with some servers; EINVAL has other causes as well, such as no such bucket.
            if error.errno != errno.EINVAL or not _is_there(filesystem, name):
                failed_before = True
                raise
            if not _is_ours(filesystem, name, data, writer, failed_before):
                raise FileExistsError(errno.EEXIST, "it exists already", name) from error
        except Exception:
            failed_before = True
            raise

    retried(put)


def _is_there(filesystem: AbstractFileSystem, name: str) -> bool:
    filesystem.invalidate_cache(posixpath.dirname(name))
    return filesystem.exists(name)


def _is_ours(filesystem: AbstractFileSystem, name: str, data: bytes, writer: str | None, failed_before: bool) -> bool:
    """Return whether the object is from this very call, whose first answer was lost (botocore asks again by itself)."""
    filesystem.invalidate_cache(posixpath.dirname(name))
    if writer is not None:
        return filesystem.metadata(name).get(_WRITER) == writer
    return failed_before and filesystem.cat_file(name) == data


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
