"""Files that exactly one writer creates: the loser is told, on disk and in object stores."""

from __future__ import annotations

import errno
import os

from fsspec import AbstractFileSystem

from storage.urls import local_path, open_filesystem


def create_exclusively(url: str | os.PathLike[str], data: bytes) -> None:
    """Write a new file, its folders included.

    Raises:
        FileExistsError: it is there already, or another writer was faster.
    """
    path = local_path(url)
    if path is None:
        create_object(*open_filesystem(url), data)
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "xb") as file:
        file.write(data)


def create_object(filesystem: AbstractFileSystem, name: str, data: bytes) -> None:
    """Put a new object.

    Raises:
        FileExistsError: it is there already, or another writer was faster.
    """
    try:
        filesystem.pipe_file(name, data, mode="create")
    except FileExistsError:
        raise
    except OSError as error:
        # s3fs says "taken" by EINVAL with some servers; EINVAL has other causes as well, such as no such bucket.
        if error.errno != errno.EINVAL:
            raise
        filesystem.invalidate_cache(name.rpartition("/")[0])
        if not filesystem.exists(name):
            raise
        raise FileExistsError(errno.EEXIST, "it exists already", name) from error
