"""Which staged sets go: all that are neither kept, nor newer than we know of, nor being read."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import posixpath
import re
import time
import uuid
from collections.abc import Collection, Iterator

from storage.errors import describe_error, hide_credentials
from storage.heartbeat import Heartbeat
from storage.manifest import MANIFEST_NAME
from storage.process_identity import has_died, own_identity
from storage.retry import as_os_error, retried
from storage.small_files import list_names, read_file, remove_file, remove_files, remove_folder
from storage.urls import is_s3, join_url, local_path, open_filesystem

_SET = re.compile(r"step-(\d{8,})-(\d+)")
# What a change of the plan has staged for itself: its step, the writer's take-over, and the number of the attempt.
_TRANSITION_SET = re.compile(r"transition-(\d{8,})-(\d+)\.\d+")
_READERS = "readers"  # a folder in the root: a marker for every reader, named by the set it reads
# A marker, and on its way to that name (on local disk, where a kill may leave it).
_MARKER = re.compile(r"\.?(step-\d{8,}-\d+)@[0-9a-f]{32}(\.[0-9a-f]{32}\.new)?")
_BEAT_S = 5.0  # of a reader's marker
_log = logging.getLogger(__name__)

# Markers of readers that this process has seen: what they held, and since when by this process's clock.
_seen: dict[str, tuple[bytes, float]] = {}


def retire(
    root_url: str,
    *,
    keep: Collection[str],
    own: Collection[str] = (),
    lease_s: float,
    take_over: int | None = None,
    transitions: bool = False,
) -> list[str]:
    """Remove the sets of a staging root that nobody needs, and return their names.

    A set goes when it is neither in `keep` nor in `own`, its writer's take-over is not later than ours, and no reader
    holds it; so what killed writers have left goes, too. Its manifest goes first: what a kill leaves in the middle of
    it is no set any more, and goes with the next call. Only files that lie directly in folders named like sets are
    touched, through no symbolic link.

    Args:
        root_url: the folder that holds the sets.
        keep: names of sets to keep.
        own: names of sets that are being written.
        lease_s: how long a reader may go without a sign of life. Nothing is waited for: the signs are compared with
            those of earlier calls in this process.
        take_over: number of our take-over; None for the greatest in `keep` and `own`.
        transitions: remove what changes of the plan have staged for themselves, too; only while none is under way, or
            with its sets in `own`. They are never to be kept for longer.

    Raises:
        ValueError: a name is none of a set.
        OSError: the store can't be read or written.
    """
    root = root_url.rstrip("/") or "/"
    stay = {*keep, *own}
    numbers = [_take_over_of(name) for name in stay]
    latest = max(numbers, default=0) if take_over is None else take_over
    candidates = [
        name
        for name in list_names(root)
        if (_SET.fullmatch(name) or (transitions and _TRANSITION_SET.fullmatch(name)))
        and name not in stay
        and _take_over_of(name) <= latest
        and _is_folder(root, name)
    ]
    read = _sets_read(root, lease_s) if candidates else set()
    return [name for name in candidates if name not in read and _remove_set(root, name, lease_s)]


def discard_set(root_url: str, name: str) -> None:
    """Remove a set that its own writer has given up: nobody reads it, since it was never a commit.

    Raises:
        ValueError: the name is none of a set.
        OSError: the store can't be read or written.
    """
    _take_over_of(name)
    root = root_url.rstrip("/") or "/"
    if _is_folder(root, name):
        _remove_files(join_url(root, name))


@contextlib.contextmanager
def being_read(root_url: str, set_name: str) -> Iterator[None]:
    """Keep a set from being retired, by whatever process, while it is read; its manifest has to be read inside.

    A store that may only be read takes no marker: then the set is read unprotected.

    Raises:
        ValueError: the name is none of a set.
        FileNotFoundError: there is no such set on the local disk.
        OSError: the store can't be written.
    """
    _take_over_of(set_name)
    root = root_url.rstrip("/") or "/"
    if not _is_folder(root, set_name):
        raise FileNotFoundError(errno.ENOENT, "there is no such set", hide_credentials(join_url(root, set_name)))
    marker = join_url(root, f"{_READERS}/{set_name}@{uuid.uuid4().hex}")
    heartbeat = Heartbeat(marker, _BEAT_S, {"process": own_identity()})
    try:
        _mark(heartbeat)
    except OSError as error:
        if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
            raise
        _log.info("%s is read without a marker: %s", hide_credentials(root), describe_error(error))
        yield
        return
    heartbeat.start()
    try:
        yield
    finally:
        heartbeat.stop()
        _remove_readers_folder(root)


def _remove_set(root: str, name: str, lease_s: float) -> bool:
    """Remove a set and return whether nothing is left of it."""
    url = join_url(root, name)
    remove_file(join_url(url, MANIFEST_NAME))
    if name in _sets_read(root, lease_s):  # a reader that came before the manifest went: the rest goes next time
        return False
    return _remove_files(url)


def _remove_files(url: str) -> bool:
    _abort_uploads(url)
    remove_file(join_url(url, MANIFEST_NAME))
    remove_files([join_url(url, file) for file in list_names(url)])
    return remove_folder(url)


def _sets_read(root: str, lease_s: float) -> set[str]:
    """Return the sets that have a marker of a living reader.

    Markers are removed that didn't change for the lease, or whose process is known to have ended.
    """
    read = set()
    names = list_names(join_url(root, _READERS))
    for marker in [one for one in _seen if posixpath.dirname(one) == join_url(root, _READERS)]:
        if posixpath.basename(marker) not in names:  # that reader is done
            _seen.pop(marker, None)
    for name in names:
        match = _MARKER.fullmatch(name)
        if match is None:
            continue
        marker = join_url(root, f"{_READERS}/{name}")
        try:
            sign = read_file(marker)
        except FileNotFoundError:  # done by now
            continue
        last, since = _seen.get(marker, (None, 0.0))
        silent_s = time.monotonic() - since if sign == last else 0.0
        if _is_of_the_dead(sign) or silent_s > max(lease_s, 4 * _BEAT_S):
            remove_file(marker)
            _remove_readers_folder(root)
            _seen.pop(marker, None)
            continue
        if sign != last:
            _seen[marker] = (sign, time.monotonic())
        if not name.startswith("."):
            read.add(match[1])
    return read


def _is_of_the_dead(sign: bytes) -> bool:
    """Return whether a marker's process is known to have ended: one of this machine."""
    try:
        return has_died(json.loads(sign)["process"])
    except (ValueError, KeyError, TypeError):  # half written, or by someone else
        return False


def _mark(heartbeat: Heartbeat) -> None:
    """Write a reader's marker, though another reader's end may remove the folder in between."""
    for _ in range(10):
        with contextlib.suppress(FileNotFoundError):
            heartbeat.beat()
            return
    heartbeat.beat()


def _remove_readers_folder(root: str) -> None:
    try:
        remove_folder(join_url(root, _READERS))
    except Exception as error:  # every store has errors of its own; an empty folder is no harm
        _log.info("an empty folder stays in %s: %s", hide_credentials(root), describe_error(as_os_error(error)))


def _abort_uploads(url: str) -> None:
    """Give up what killed writers have begun to upload into a set in parts: S3 keeps, and bills, it out of sight."""
    filesystem, folder = open_filesystem(url)
    if not is_s3(filesystem):
        return
    bucket, prefix, _ = filesystem.split_path(f"{folder}/")
    try:
        found = retried(lambda: filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix))
        for upload in found.get("Uploads", []):
            place = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            filesystem.call_s3("abort_multipart_upload", **place)
    except Exception as error:  # servers that don't know it, credentials that don't allow it: the set goes all the same
        _log.info("unfinished uploads of %s stay: %s", hide_credentials(url), describe_error(as_os_error(error)))


def _is_folder(root: str, name: str) -> bool:
    """Return whether a set of that name may be there: on the local disk, a folder itself and no link to one."""
    path = local_path(join_url(root, name))
    return path is None or (os.path.isdir(path) and not os.path.islink(path))


def _take_over_of(name: str) -> int:
    match = _SET.fullmatch(name) or _TRANSITION_SET.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no name of a staged set; such names look like 'step-00000012-1'.")
    return int(match[2])
