"""Which process of which machine one is: what it has left says so, and whether it still lives can be asked at once."""

from __future__ import annotations

import os
from typing import Any


def own_identity() -> list[str | int] | None:
    """Return what tells this process from all others: kernel, pid namespace, pid and start; None where that is unknown.

    A process that is forked from this one has another.
    """
    try:
        return [*_world(), os.getpid(), _start(os.getpid())]
    except (OSError, ValueError):
        return None


def has_died(identity: Any) -> bool:
    """Return whether a process of this machine has ended; False where it can't be known, such as of another host's."""
    try:
        boot, namespace, pid, start = identity
        if [boot, namespace] != _world() or not isinstance(pid, int):
            return False
        return _start(pid) != start
    except FileNotFoundError:
        return not _is_hidden(pid)
    except (OSError, ValueError, TypeError):
        return False


def _is_hidden(pid: int) -> bool:
    """Return whether a process is there that /proc doesn't show: `hidepid` hides those of other users."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _world() -> list[str | int]:
    """Return the running kernel and the namespace in which pids mean what they do here."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return [file.read().strip(), os.stat("/proc/self/ns/pid").st_ino]


def _start(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; -1 for one that has ended and waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rpartition(")")[2].split()
    except ProcessLookupError:  # it ended between the open and the read
        return -1
    return -1 if state in "ZX" else int(fields[18])
