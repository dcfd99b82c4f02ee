"""Who is killed, and when exactly: one doom a process tree, carried to driver and workers by the environment.

A moment is a piece of work of the driver or of a worker. Its points are before it, after it, and in its middle, where
something half done is left: a torn file, an update that not all ranks have made. The process that comes to the doomed
point kills the victims with SIGKILL, itself last.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

T = TypeVar("T")

# Work of a worker, and work of the driver.
WORKER_MOMENTS = ("generation", "training", "weight sync", "shard write", "restore")
DRIVER_MOMENTS = ("manifest write", "journal record", "retention", "start", "metrics")
MOMENTS = WORKER_MOMENTS + DRIVER_MOMENTS
# Work of the driver while the plan changes, in this order.
TRANSITION_MOMENTS = (
    "planning",
    "preparation",
    "primitive",
    "verification",
    "transition record",
    "putting in force",
    "adoption",
    "release",
    "discarding",
    "transition line",
)
VICTIMS = ("worker", "driver", "both")
PHASES = ("before", "middle", "after")

_ENVIRONMENT = "NEREUS_TEST_DOOM"


@dataclass(frozen=True)
class Doom:
    """One kill.

    Attributes:
        moment: one of MOMENTS or TRANSITION_MOMENTS.
        phase: one of PHASES.
        count: how often its process must have come to the moment, from 1.
        nth: in the middle: how many small parts of the work are done before.
        victim: one of VICTIMS, or "stop": the driver is stopped by SIGSTOP instead.
        device: of the worker that is meant.
        delay_s: in the middle of a request to a remote store: the time from its start.
    """

    moment: str
    phase: str
    victim: str
    device: int = 0
    count: int = 1
    nth: int = 1
    delay_s: float = 0.005

    def __str__(self) -> str:
        part = f", part {self.nth}" if self.phase == "middle" else ""
        return f"{self.victim} {self.phase} {self.moment} {self.count}{part}"


class Reaper:
    """Carries a doom out in one process; without a doom it does nothing."""

    def __init__(self, doom: Doom | None, *, driver: int, report: str, device: int | None = None) -> None:
        """Remember the doom.

        Args:
            driver: the driver's process id.
            report: file that tells afterwards that the point was reached.
            device: of the worker that this process is; None in the driver.
        """
        self._doom, self._driver, self._report, self._device = doom, driver, report, device
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()  # shards are written by several threads
        self._parts = 0
        self._armed: tuple[str, int] | None = None  # moment and thread whose middle is doomed
        self.find_worker: Callable[[int], int | None] = lambda device: None  # the driver knows its workers

    def announce(self) -> None:
        """Let processes that are started from here on know the doom."""
        doom = None if self._doom is None else asdict(self._doom)
        os.environ[_ENVIRONMENT] = json.dumps({"doom": doom, "driver": self._driver, "report": self._report})

    @classmethod
    def from_environment(cls, device: int) -> Self:
        """Return the reaper of a worker."""
        told = json.loads(os.environ[_ENVIRONMENT])
        doom = None if told["doom"] is None else Doom(**told["doom"])
        return cls(doom, driver=told["driver"], report=told["report"], device=device)

    def around(self, moment: str, work: Callable[[], T]) -> T:
        """Do a piece of work, unless its moment is the doomed one."""
        doom = self._doom
        if doom is None or doom.moment != moment or self._device not in (None, doom.device):
            return work()
        with self._counts_lock:
            self._counts[moment] += 1
            is_doomed = self._counts[moment] == doom.count
        if not is_doomed:
            return work()
        if doom.phase == "before":
            self._strike()
        if doom.phase == "middle":
            with self._middle(moment):
                return work()
        result = work()
        self._strike()
        return result

    @contextmanager
    def _middle(self, moment: str) -> Iterator[None]:
        self._armed, self._parts = (moment, threading.get_ident()), 0
        try:
            yield
        finally:
            self._armed = None

    def part(self, *moments: str, done: float = 1.0) -> None:
        """Note that a small part of the work is done; kills when it is the doomed one and `done` is at least a half."""
        if self._is_armed(moments):
            assert self._doom is not None
            self._parts += 1
            if self._parts >= self._doom.nth and done >= 0.5:
                self._armed = None
                self._strike()

    def while_remote(self, moments: Collection[str], request: Callable[[], T]) -> T:
        """Send a request to a remote store, and kill while it is on its way, if that is the doom."""
        if not self._is_armed(moments):
            return request()
        assert self._doom is not None
        self._armed = None
        timer = threading.Timer(self._doom.delay_s, self._strike)
        timer.start()
        result = request()
        timer.join()
        return result

    def _is_armed(self, moments: Collection[str]) -> bool:
        return self._armed is not None and self._armed[0] in moments and self._armed[1] == threading.get_ident()

    def _strike(self) -> None:
        assert self._doom is not None
        pids = self._victims(self._doom.victim, self._doom.device)
        if not pids:  # there is no such worker yet
            return
        with open(self._report, "a") as file:
            file.write(f"{os.getpid()} struck: {self._doom}\n")
        for pid in pids:
            os.kill(pid, signal.SIGSTOP if self._doom.victim == "stop" else signal.SIGKILL)

    def _victims(self, victim: str, device: int) -> list[int]:
        """Return the process ids to kill, this process last."""
        pids = []
        if victim in ("worker", "both"):
            pids.append(self.find_worker(device) if self._device is None else os.getpid())
        if victim in ("driver", "both", "stop"):
            pids.append(self._driver)
        return sorted((pid for pid in pids if pid is not None), key=lambda pid: pid == os.getpid())


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a function of a module or class, in this process, by one that is made from it."""
    setattr(owner, name, around(getattr(owner, name)))
