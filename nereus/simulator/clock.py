"""Virtual time: events in the order of their times, and in the order of their making where times are equal."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """A queue of events; `now` is the time of the one that runs, in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let `action` happen `seconds` from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._number), action))

    def run(self) -> None:
        """Let all events happen, those that they cause included."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()

    def clear(self) -> None:
        """Forget what has not happened yet."""
        self._events.clear()
