"""What lies in /dev/shm, and what of it nobody uses any more: other processes of this machine may use it, too."""

from __future__ import annotations

import os
import time
from pathlib import Path

_FOLDER = Path("/dev/shm")
# A file may be there for a moment before its owner has opened it, or after it has closed it.
_SETTLE_S = 2.0


def shared_files() -> set[str]:
    """Return the names of the files in shared memory."""
    return {str(path) for path in _FOLDER.iterdir() if path.is_file()}


def leaked_files(before: set[str]) -> set[str]:
    """Return the files that are new, stay, and that no process has open or mapped."""
    deadline = time.monotonic() + _SETTLE_S
    while (left := shared_files() - before - _used()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def _used() -> set[str]:
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        for folder in ("fd", "map_files"):
            try:
                names = [*(process / folder).iterdir()]
            except OSError:  # it has ended, or is another user's
                continue
            for name in names:
                try:
                    used.add(os.readlink(name))
                except OSError:
                    continue
    return used
