"""What is known of the deaths of workers: how long a restart waits, and when a device is no longer trusted."""

from __future__ import annotations

# A device's first, second, third restart waits this long; every later one as long as the last.
RESTART_WAITS_S = (1.0, 2.0, 4.0)
# This many deaths of a device within this many steps quarantine it.
MOST_DEATHS, DEATH_WINDOW_STEPS = 3, 10


class Deaths:
    """The deaths of each device's workers in a run; pure: the caller counts, waits and restarts."""

    def __init__(self) -> None:
        self._steps: dict[int, list[int]] = {}  # of each death whose step is known
        self._restarts: dict[int, int] = {}

    def note(self, device: int, step: int | None) -> None:
        """Note a death in a PPO step; one without a step doesn't count towards quarantine."""
        if step is not None:
            self._steps.setdefault(device, []).append(step)

    def is_quarantined(self, device: int) -> bool:
        """Return whether any three deaths of a device in a row lie within ten steps; a run may go back in between."""
        steps = self._steps.get(device, [])
        windows = (steps[start : start + MOST_DEATHS] for start in range(len(steps) - MOST_DEATHS + 1))
        return any(max(window) - min(window) < DEATH_WINDOW_STEPS for window in windows)

    def take_wait_s(self, device: int) -> float:
        """Return how long the restart that comes next on a device waits, and count it."""
        restarts = self._restarts.get(device, 0)
        self._restarts[device] = restarts + 1
        return RESTART_WAITS_S[min(restarts, len(RESTART_WAITS_S) - 1)]
