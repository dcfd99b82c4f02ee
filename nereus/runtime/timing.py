"""Seconds of a step by stage: the wall time between a stage's first start and its last end; of pauses their sum."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from nereus.runtime.command_times import StepTimes

# What interrupts a step now and then: only the pauses themselves count.
_PAUSES = ("staging", "transition")


class StepClock:
    """Spans of one step; parts of one stage may overlap and come from several threads.

    `times` has what the step's commands took inside the workers.
    """

    def __init__(self) -> None:
        self.started_s = self._begun_s = time.perf_counter()
        self.times = StepTimes()
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            stop = time.perf_counter()
            with self._lock:
                self._spans.setdefault(stage, []).append((start, stop))

    def begin_again(self) -> None:
        """Forget what the step has done so far: it was broken off. Its seconds and its moves stay in the total."""
        with self._lock:
            self._begun_s, self.times = time.perf_counter(), StepTimes()
            self._spans = {stage: spans for stage, spans in self._spans.items() if stage == "transition"}

    def work_s(self) -> float:
        """Return the seconds since the step began, or began again, without those of moves since then."""
        now, begun = time.perf_counter(), max(self._begun_s, self.started_s)
        moves = [(max(start, begun), stop) for start, stop in self._spans.get("transition", ()) if stop > begun]
        return now - begun - _length_of_union(moves)

    def seconds(self, stages: tuple[str, ...]) -> dict[str, float]:
        """Return the stages' seconds, "total" since the clock began, and what no stage accounts for."""
        total = time.perf_counter() - self.started_s
        result = {stage: self._length(stage) for stage in stages}
        return {**result, "orchestration": max(0.0, total - sum(result.values())), "total": total}

    def _length(self, stage: str) -> float:
        spans = self._spans.get(stage, ())
        if stage not in _PAUSES:
            return max((stop for _, stop in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
        return _length_of_union(spans)


def _length_of_union(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which there is at least one of some spans: several threads may pause at the same time."""
    length, end = 0.0, -math.inf
    for start, stop in sorted(spans):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length
