"""Seconds of a step by stage: the wall time between a stage's first start and its last end; of pauses their sum."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nereus.runtime.command_times import StepTimes

# What interrupts a step now and then: only the pauses themselves count.
_PAUSES = ("staging",)


class StepClock:
    """Spans of one step; parts of one stage may overlap and come from several threads.

    `times` has what the step's commands took inside the workers.
    """

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
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

    def seconds(self, stages: tuple[str, ...]) -> dict[str, float]:
        """Return the stages' seconds, "total" since the clock began, and what no stage accounts for."""
        total = time.perf_counter() - self.started_s
        result = {stage: self._length(stage) for stage in stages}
        return {**result, "orchestration": max(0.0, total - sum(result.values())), "total": total}

    def _length(self, stage: str) -> float:
        spans = sorted(self._spans.get(stage, ()))
        if stage not in _PAUSES:
            return max((stop for _, stop in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
        length, end = 0.0, -math.inf
        for start, stop in spans:  # several threads may pause at the same time
            length += max(0.0, stop - max(start, end))
            end = max(end, stop)
        return length
