"""Small files of one folder, at any URL: listed, read, written and removed whole, with retries where it is remote."""

from __future__ import annotations

import os
import posixpath
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from storage.retry import retried
from storage.urls import local_path, open_filesystem

_THREADS = 16  # of reading many objects


def list_names(url: str | os.PathLike[str]) -> list[str]:
    """Return the sorted names of what lies directly in a folder, files and folders; none where there is no folder."""
    path = local_path(url)
    if path is not None:
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
    filesystem, folder = open_filesystem(url)

    def ls() -> list[str]:
        filesystem.invalidate_cache(folder)
        try:
            return filesystem.ls(folder, detail=False)
        except FileNotFoundError:
            return []

    names = {posixpath.basename(name.rstrip("/")) for name in retried(ls) if name.rstrip("/") != folder.rstrip("/")}
    return sorted(names - {""})


def read_file(url: str | os.PathLike[str]) -> bytes:
    """Return a whole file; FileNotFoundError when there is none."""
    path = local_path(url)
    if path is not None:
        with open(path, "rb") as file:
            return file.read()
    filesystem, name = open_filesystem(url)
    return retried(lambda: filesystem.cat_file(name))


def read_files(urls: Sequence[str]) -> list[bytes]:
    """Return several files in order; objects of a remote store are fetched side by side."""
    if not urls or local_path(urls[0]) is not None:
        return [read_file(url) for url in urls]
    with ThreadPoolExecutor(min(_THREADS, len(urls))) as threads:
        return list(threads.map(read_file, urls))


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


def replace_file(url: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole, over an older one: a reader sees the old or the new. Not synced to the disk."""
    path = local_path(url)
    if path is None:
        filesystem, name = open_filesystem(url)
        retried(lambda: filesystem.pipe_file(name, data))
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.{uuid.uuid4().hex}.new"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise


def remove_file(url: str | os.PathLike[str]) -> None:
    """Remove a file, if it is there."""
    path = local_path(url)
    if path is not None:
        _unlink(path)
        return
    filesystem, name = open_filesystem(url)

    def remove() -> None:
        try:
            filesystem.rm_file(name)
        except FileNotFoundError:
            return

    retried(remove)


def _unlink(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
