"""Records of a run, one JSON object each: lines of a local file, objects of one folder in an object store."""

from __future__ import annotations

import contextlib
import json
import math
import os
import posixpath
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from storage.errors import hide_credentials
from storage.exclusive import create_object, make_folder, sync_folder
from storage.small_files import list_names, read_files, remove_file, replace_file
from storage.urls import join_url, local_path, open_filesystem


def append_record(
    url: str | os.PathLike[str],
    record: Mapping[str, Any],
    *,
    number: int | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Add one record at the end; it is durable when this returns, since commits rely on the records of their steps.

    On local disk it is one line; the torn end of a line that a crash left is removed first. In an object store
    `url` is a folder with one object a record, numbered. Numbers that JSON doesn't know (nan, inf) become null.

    Args:
        url: the file, or folder of objects.
        record: what is added.
        number: of the object, in an object store; None for the next one that is free. One that is there already is
            replaced: it is of a driver that was taken over.
        check: raises when the writer has lost its right to write. A writer that is held up right after this call can't
            do harm any more, provided that whoever takes over calls `keep_records` before it writes.
    """
    data = json.dumps(_plain(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
    path = local_path(url)
    if path is None:
        if number is None:
            check()
            _put_next(os.fspath(url), data)
        else:
            _put_at(join_url(url, f"{number:08d}.json"), data, check)
        return
    folder = os.path.dirname(path) or "."
    make_folder(folder)
    is_new = not os.path.exists(path)
    with open(path, "a+b", buffering=0) as file:
        check()  # the file is open: where another writer has put a new one in its place, what follows goes nowhere
        _drop_torn_end(file.fileno())
        _write_all(file.fileno(), data)
        os.fsync(file.fileno())
    if is_new:
        sync_folder(folder)


def read_records(url: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all records in order, none when there is no such file; a torn last line is left out.

    Raises:
        ValueError: a line before the last is no JSON object; it is named by its number.
    """
    path = local_path(url)
    if path is None:
        lines = read_files(_objects(os.fspath(url)))
    else:
        try:
            with open(path, "rb") as file:
                lines = file.read().split(b"\n")[:-1]  # what follows the last line end is empty or torn
        except FileNotFoundError:
            return []
    return [_parse(line, number, url) for number, line in enumerate(lines, start=1)]


def keep_records(
    url: str | os.PathLike[str],
    keep: Callable[[dict[str, Any]], bool],
    *,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Remove the records for which `keep` is false.

    On local disk a reader sees the old file or the new one; in an object store the last records go first, so that what
    a kill leaves of them still has no hole.

    Args:
        url: the file, or folder of objects.
        keep: tells of a record whether it stays.
        check: raises when the writer has lost its right to write: called right before anything is removed.
    """
    path = local_path(url)
    if path is None:
        objects = _objects(os.fspath(url))
        for name, data in reversed(list(zip(objects, read_files(objects), strict=True))):
            if not keep(_parse(data, 1, name)):
                check()
                remove_file(name)
        return
    records = read_records(url)
    if os.path.exists(path):
        _replace(path, (record for record in records if keep(record)), check)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _parse(line: bytes, number: int, url: str | os.PathLike[str]) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise ValueError(
            f"line {number} of {hide_credentials(os.fspath(url))} is no JSON object; remove or mend that line."
        )
    return record


def _drop_torn_end(fd: int) -> None:
    """Cut the file behind its last line end."""
    end = os.fstat(fd).st_size
    while end:
        start = max(0, end - 4096)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            end = start + found + 1
            break
        end = start
    if end != os.fstat(fd).st_size:
        os.ftruncate(fd, end)


def _write_all(fd: int, data: bytes) -> None:
    """Write all bytes; a disk that fills up takes some first, and refuses the rest with an error."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _replace(path: str, records: Iterable[Mapping[str, Any]], check: Callable[[], None]) -> None:
    temporary = f"{path}.new"
    try:
        with open(temporary, "wb") as file:
            for record in records:
                file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        check()
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    sync_folder(os.path.dirname(path) or ".")


def _objects(url: str) -> list[str]:
    return [join_url(url, name) for name in list_names(url) if name.endswith(".json")]


def _put_at(url: str, data: bytes, check: Callable[[], None]) -> None:
    check()
    try:
        create_object(*open_filesystem(url), data)
    except FileExistsError:
        check()  # it is ours to replace, or else we are the one that was taken over
        replace_file(url, data)


def _put_next(url: str, data: bytes) -> None:
    objects = _objects(url)
    number = int(posixpath.basename(objects[-1]).removesuffix(".json")) + 1 if objects else 0
    while True:
        try:
            create_object(*open_filesystem(join_url(url, f"{number:08d}.json")), data)
            return
        except FileExistsError:  # taken by another writer
            number += 1
