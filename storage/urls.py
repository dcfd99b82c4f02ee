"""Local paths and fsspec URLs: one way to tell them apart and to open them."""

from __future__ import annotations

import os
import posixpath

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem


def open_filesystem(url: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path inside it."""
    return url_to_fs(os.fspath(url))


def local_path(url: str | os.PathLike[str]) -> str | None:
    """Return the path of a file on this machine, or None for a URL of another store."""
    filesystem, path = open_filesystem(url)
    return path if isinstance(filesystem, LocalFileSystem) else None


def join_url(url: str | os.PathLike[str], name: str) -> str:
    """Return the path or URL of `name` inside the folder `url`."""
    return posixpath.join(os.fspath(url), name)
