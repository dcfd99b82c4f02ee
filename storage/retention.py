"""Which staged sets go: all that are neither kept, nor being written, nor being read."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Collection, Iterator

from storage.small_files import list_names, read_file, remove_file, replace_file
from storage.urls import join_url

MANIFEST = "manifest.json"
_SET = re.compile(r"step-(\d{8,})-(\d+)")
_MARKER = re.compile(r"(step-\d{8,}-\d+)@[0-9a-f]{32}")
_READERS = "readers"
_BEAT_S = 5.0


def retire(
    root_url: str, *, keep: Collection[str], own: Collection[str] = (), lease_s: float, take_over: int | None = None
) -> list[str]:
    """Remove the sets of a staging root that nobody needs, and return their names.

    A set goes when it is neither kept nor own, no reader holds it, and its writer's take-over is not after ours. Its
    manifest goes first, so that what a kill leaves is no set any more; the next call removes the rest.

    Args:
        root_url: the folder that holds the sets.
        keep: names of sets to keep.
        own: names of sets that this driver is writing.
        lease_s: how long a reader of another host may go without a sign of life.
        take_over: number of this driver's take-over; None takes the greatest in `keep` and `own`.
    """
    root = root_url.rstrip("/")
    stay = {*keep, *own}
    for name in stay:
        _check_name(name)
    if take_over is None:
        take_over = max((_take_over_of(name) for name in stay), default=0)
    stay |= _sets_read(root, lease_s)
    gone = []
    for name in list_names(root):
        if not _SET.fullmatch(name) or name in stay or _take_over_of(name) > take_over:
            continue
        remove_file(join_url(root, f"{name}/{MANIFEST}"))
        if name in _sets_read(root, lease_s):  # a reader that had the manifest before it went
            continue
        for file in list_names(join_url(root, name)):
            remove_file(join_url(root, f"{name}/{file}"))
        gone.append(name)
    return gone


@contextlib.contextmanager
def being_read(root_url: str, set_name: str) -> Iterator[None]:
    """Keep a set from being retired while it is read; its manifest has to be read inside."""
    _check_name(set_name)
    url = join_url(root_url.rstrip("/"), f"{_READERS}/{set_name}@{uuid.uuid4().hex}")
    replace_file(url, b"{}")
    end = threading.Event()

    def beat() -> None:
        count = 0
        while not end.wait(_BEAT_S):
            count += 1
            with contextlib.suppress(OSError):
                replace_file(url, json.dumps({"beat": count}).encode())

    thread = threading.Thread(target=beat, name="reading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        remove_file(url)


_seen: dict[str, tuple[bytes, float]] = {}  # markers of readers: what they held, and since when


def _sets_read(root: str, lease_s: float) -> set[str]:
    read = set()
    for name in list_names(join_url(root, _READERS)):
        match = _MARKER.fullmatch(name)
        if not match:
            continue
        url = join_url(root, f"{_READERS}/{name}")
        try:
            beat = read_file(url)
        except FileNotFoundError:
            continue
        last, since = _seen.get(url, (None, 0.0))
        if last != beat:
            _seen[url] = (beat, time.monotonic())
        elif time.monotonic() - since > max(lease_s, 4 * _BEAT_S):
            remove_file(url)
            _seen.pop(url, None)
            continue
        read.add(match[1])
    return read


def _take_over_of(name: str) -> int:
    match = _SET.fullmatch(name)
    assert match is not None, name
    return int(match[2])


def _check_name(name: str) -> None:
    if not _SET.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a staged set; such names are like 'step-00000012-1'.")
