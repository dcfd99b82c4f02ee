"""What befalls a run under control, and when: drawn from a seed in the test, carried out in the driver's process.

A disturbance has a point: a method of a step, or a moment of a change of the plan. When the driver comes to it, it
happens there, or a little later, in the midst of whatever is under way then.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from nereus.control import read_controls, tell_drain, tell_scale
from nereus.runtime.session import Session
from tests.chaos.doom import TRANSITION_MOMENTS

KINDS = ("drain", "notice", "death", "return", "memory", "driver")
STEP_POINTS = ("decide", "generate", "score", "infer_reference", "infer_logprobs", "infer_values",
               "estimate_advantages", "train_actor", "train_critic", "sync_weights", "finish_step",
               "stage_state", "finish")  # fmt: skip
MOVE_POINTS = (*TRANSITION_MOMENTS, "way back", "way back to a commit")
# Not every change of the plan comes to the other points, and few fail.
_COMMON_POINTS = MOVE_POINTS[:8]
_HOG_LIMIT_S = 20.0


@dataclass(frozen=True)
class Disturbance:
    """One thing that happens to a run.

    Attributes:
        kind: one of KINDS.
        point: one of STEP_POINTS or MOVE_POINTS.
        step: of a point of STEP_POINTS, all but "finish", which is no step's.
        nth: of a point of MOVE_POINTS: how often the driver must have come to it, from 1.
        delay_s: from the point on.
        device: the how-many-th of those that it can happen to.
        deadline_s: of a drain, from then on; None: not known.
        num_devices: what `scale` says where devices return.
        least: devices that a drain or a notice leaves.
    """

    kind: str
    point: str
    step: int = 0
    nth: int = 1
    delay_s: float = 0.0
    device: int = 0
    deadline_s: float | None = None
    num_devices: int = 1
    least: int = 1

    @property
    def is_in_move(self) -> bool:
        return self.point in MOVE_POINTS

    def __str__(self) -> str:
        where = f"{self.point} #{self.nth}" if self.is_in_move else f"{self.point} of step {self.step}"
        where = "finish" if self.point == "finish" else where
        deadline = "" if self.kind != "drain" or self.deadline_s is None else f" in {self.deadline_s:g} s"
        return f"{self.kind}{deadline} at {where} + {self.delay_s:.3f} s"


# Drawing

# Steps are done in a few tenths of a second.
_DELAYS_S = (0.0, 0.1)
_DEADLINES_S = (None, 0.0, 0.7, 2.0, 30.0)


def draw(rng: random.Random, kind: str, steps: range, num_devices: int, least: int) -> Disturbance:
    """Draw the rest of a disturbance of a driver that has some steps before it."""
    points = rng.choice((STEP_POINTS, _COMMON_POINTS, _COMMON_POINTS, MOVE_POINTS))
    return Disturbance(
        kind,
        point=rng.choice(points),
        step=rng.choice(steps),
        nth=rng.choice((1, 1, 1, 2)),
        delay_s=rng.choice((0.0, rng.uniform(*_DELAYS_S))),
        device=rng.randrange(num_devices),
        deadline_s=rng.choice(_DEADLINES_S),
        num_devices=rng.randint(least, num_devices),
        least=least,
    )


# Carrying out


class Disturber:
    """Carries disturbances out in a driver, and tells in a file which ones, and which commands ran out of memory."""

    def __init__(self, todo: Sequence[Disturbance], report: str) -> None:
        self.session: Session | None = None  # nothing happens before there is one
        self.is_over = False  # nor when all is done
        self._todo, self._report = list(todo), report
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # primitives run on threads
        self._hogged: set[int] = set()  # workers whose memory was used up

    def come_to(self, point: str) -> None:
        """Note that the driver comes to a point."""
        if self.session is None:
            return
        with self._lock:
            self._counts[point] += 1
            met = [one for one in self._todo if self._is_met(one, point)]
            self._todo = [one for one in self._todo if one not in met]
        for one in met:
            if one.delay_s == 0:
                self._act(one)
            else:
                timer = threading.Timer(one.delay_s, self._act, [one])
                timer.daemon = True
                timer.start()

    def _is_met(self, one: Disturbance, point: str) -> bool:
        assert self.session is not None
        if one.is_in_move:
            return one.point == point and one.nth == self._counts[point]
        return one.point == point and (point == "finish" or one.step == self.session.next_step)

    def _act(self, one: Disturbance) -> None:
        assert self.session is not None
        if self.is_over:
            return
        run_dir, device = self.session.run_dir, self._device_of(one)
        pid = os.getpid() if one.kind == "driver" else self.session.worker_pids().get(-1 if device is None else device)
        if (device if one.kind == "drain" else pid) is None and one.kind != "return":
            return
        self.tell({**asdict(one), "device": device, "text": str(one)})
        if one.kind == "drain":
            assert device is not None
            with suppress(ValueError):  # it is drained already
                tell_drain(run_dir, device, None if one.deadline_s is None else time.time() + one.deadline_s)
        elif one.kind == "return":
            tell_scale(run_dir, one.num_devices)
        elif one.kind == "memory":
            assert device is not None and pid is not None
            self._hogged.add(pid)
            with suppress(Exception):  # it died meanwhile
                self.session._engine.submit(device, "hog").result(_HOG_LIMIT_S)
        else:
            assert pid is not None
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if one.kind == "notice" else signal.SIGKILL)

    def _device_of(self, one: Disturbance) -> int | None:
        """Return whom it happens to: of a drain a device that there is, else one with a worker; None: nobody."""
        assert self.session is not None and self.session._devices is not None
        there = set(self.session._devices.present) - read_controls(self.session.run_dir).drains.keys()
        possible = there if one.kind == "drain" else {*self.session.worker_pids()}
        if one.kind == "notice":
            possible &= there
        if one.kind in ("drain", "notice") and len(there) <= one.least:
            return None
        return sorted(possible)[one.device % len(possible)] if possible else None

    def note_failure(self, device: int | None, text: str) -> None:
        """Take note of a command that ran out of memory."""
        pids = {} if self.session is None else self.session.worker_pids()
        forced = device is not None and pids.get(device) in self._hogged
        self.tell({"out_of_memory": text, "forced": forced})

    def tell(self, line: dict[str, Any]) -> None:
        """Append a line to the report."""
        with open(self._report, "a") as file:
            file.write(json.dumps(line) + "\n")
