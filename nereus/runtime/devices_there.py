"""The devices that a running job has: by its trace, by what people say, by notices to workers, and by their deaths."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from nereus.control import ControlReader, tell_drain
from nereus.runtime.engine import Engine
from nereus.supply import DeviceSupply, Supply

logger = logging.getLogger(__name__)

# Between two looks at the deadlines of drained devices.
_LOOK_S = 0.5


class DevicesThere:
    """What there is at each boundary; `present` is what the last look found."""

    def __init__(
        self, run_dir: str, total: int, trace: Sequence[tuple[int, int]], record: Mapping[str, Any] | None = None
    ) -> None:
        """Args: total: devices of the cluster; record: what staged state keeps, of a run that goes on."""
        self._run_dir = run_dir
        self._supply = DeviceSupply.from_record(record, total, trace) if record else DeviceSupply(total, trace)
        self._controls = ControlReader(run_dir)
        self.present: tuple[int, ...] = ()

    def begin_again(self, step: int) -> None:
        """Let a run go on at a step: the 0 devices that ended it are over."""
        self._supply.begin_again(step, self._controls.read())

    def hear_notices(self, engine: Engine) -> frozenset[int]:
        """Return the devices whose worker was told to go, and see to it that they stay away when it is gone too.

        They do until a `scale` says that they are back.
        """
        noticed = engine.notices()
        for device in noticed:
            with suppress(ValueError):  # it is drained already
                tell_drain(self._run_dir, device, None)
        return noticed

    def look(self, step: int, engine: Engine) -> Supply:
        """Return the devices from the boundary before a step on."""
        noticed = self.hear_notices(engine)
        supply = self._supply.at(step, self._controls.read(), noticed=noticed, quarantined=engine.quarantined)
        if self.present and supply.present != self.present:
            logger.info("step %d: devices %s (%s).", step, list(supply.present), supply.reason)
        self.present = supply.present
        return supply

    def to_record(self) -> dict[str, Any]:
        """Return what staged state keeps."""
        return self._supply.to_record()


def out_of_time(supply: Supply, devices: Collection[int], seconds: float) -> frozenset[int]:
    """Return those of some devices that are gone in less than so many seconds."""
    deadlines = {device: end for device, end in supply.leaving.items() if end and device in devices}
    return frozenset(device for device, end in deadlines.items() if end - time.time() < seconds)


class Deadlines:
    """Ends the worker of a drained device when its time has come, also in the midst of a step: the device is lost then.

    It has a thread of its own, from `start` to `close`.
    """

    def __init__(self, run_dir: str, engine: Engine, in_use: Callable[[], Collection[int]]) -> None:
        """Args: in_use: the devices of the plan in force; others are let go at a boundary."""
        self._controls, self._engine, self._in_use = ControlReader(run_dir), engine, in_use
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nereus-deadlines", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=10)

    def _watch(self) -> None:
        ended: set[int] = set()
        while not self._end.wait(_LOOK_S):
            drains = self._controls.read().drains
            ended &= set(drains)
            for device, end in drains.items():
                pid = self._engine.pids().get(device)
                if end and end < time.time() and device not in ended and pid and device in self._in_use():
                    ended.add(device)
                    logger.warning("The deadline of device %d has passed; its worker is ended.", device)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
