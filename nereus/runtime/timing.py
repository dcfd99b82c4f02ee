"""Seconds of a step by stage: the wall time between a stage's first start and its last end."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Spans of one step; parts of one stage may overlap and come from several threads."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self._spans: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def span(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            stop = time.perf_counter()
            with self._lock:
                first, last = self._spans.get(stage, (start, stop))
                self._spans[stage] = (min(first, start), max(last, stop))

    def seconds(self, stages: tuple[str, ...]) -> dict[str, float]:
        """Return the stages' seconds, "total" since the clock began, and what no stage accounts for."""
        total = time.perf_counter() - self.started_s
        result = {stage: self._length(stage) for stage in stages}
        return {**result, "orchestration": max(0.0, total - sum(result.values())), "total": total}

    def _length(self, stage: str) -> float:
        first, last = self._spans.get(stage, (0.0, 0.0))
        return last - first
