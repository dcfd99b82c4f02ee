"""What is watched at every boundary, when it has drifted, and for how long a new plan may be expected to last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

POOL, MEMORY_VIOLATION, SCHEDULE = "devices", "memory violation", "every k steps"
LOST = "lost state"  # of devices that are there again, empty
LENGTH, FREE_MEMORY = "response length", "free memory"
SPEED, EFFICIENCY = "speed of device", "efficiency of "

# Weight of the newest interval in the moving average of intervals between crossings.
NEWEST_WEIGHT = 0.5
# Most responses at the length cap that are still no sign of a training problem.
SHARE_AT_CAP = 0.5


@dataclass(frozen=True)
class Thresholds:
    """Relative change of a signal against its reference beyond which a replan is due."""

    length: float = 0.3
    free_memory: float = 0.3
    efficiency: float = 0.2

    def of(self, signal: str) -> float:
        return {LENGTH: self.length, FREE_MEMORY: self.free_memory}.get(signal, self.efficiency)


@dataclass(frozen=True)
class Signals:
    """What the last step measured; None or absent where nothing is known yet.

    Attributes:
        response_tokens: mean response length.
        free_memory_bytes: least free memory of a device at its peak.
        efficiency: achieved efficiency by operation class.
        unsure: classes whose efficiency isn't known to within its threshold, or that hardly take any time. Such an
            estimate moves by itself as it is learned; it says nothing of the hardware, and crosses nothing.
        device_factor: how many times longer than its kind a device takes, where that isn't 1.
    """

    response_tokens: float | None = None
    free_memory_bytes: float | None = None
    efficiency: Mapping[str, float] = field(default_factory=dict)
    unsure: frozenset[str] = frozenset()
    device_factor: Mapping[int, float] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """Return every known signal by the name that triggers and records use."""
        values = {f"{EFFICIENCY}{name}": value for name, value in self.efficiency.items()}
        values |= {f"{SPEED} {device}": factor for device, factor in self.device_factor.items()}
        if self.response_tokens is not None:
            values[LENGTH] = self.response_tokens
        if self.free_memory_bytes is not None:
            values[FREE_MEMORY] = self.free_memory_bytes
        return values


class Monitor:
    """References of all signals, and the intervals between their crossings."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self.thresholds = thresholds or Thresholds()
        self._references: dict[str, float] = {}
        self._pool: tuple[int, ...] | None = None
        self._crossed_at: dict[str, int] = {}
        self._interval: dict[str, float] = {}

    def find_triggers(self, step: int, signals: Signals, pool: Sequence[int]) -> tuple[str, ...]:
        """Return the signals that crossed their thresholds since the last replan, the pool first.

        Every crossing ends an interval of its signal. A signal without a reference gets one and crosses nothing.
        """
        crossed = []
        if self._pool is not None and tuple(pool) != self._pool:
            crossed.append(POOL)
        self._pool = tuple(pool)
        values = signals.values()
        # A device of the usual speed has no signal: it is missing once it is as fast as the others again.
        values |= {name: 1.0 for name in self._references if name.startswith(SPEED) and name not in values}
        for name, value in sorted(values.items()):
            reference = self._references.setdefault(name, 1.0 if name.startswith(SPEED) else value)
            if name.removeprefix(EFFICIENCY) in signals.unsure:
                continue
            if abs(value - reference) > self.thresholds.of(name) * abs(reference):
                crossed.append(name)
        for name in crossed:
            self.note_crossing(name, step)
        return tuple(crossed)

    def reset_references(self, signals: Signals) -> None:
        """Make what is measured now the reference: at every replan, also when its candidate is refused."""
        self._references = dict(signals.values())

    def forget(self, name: str) -> None:
        """Take a signal's next value for its reference: it was that of another plan."""
        self._references.pop(name, None)

    def horizon(self, triggers: Sequence[str]) -> float:
        """Return H: steps until one of the triggers is expected to cross again; 1 before its first interval."""
        return min((self._interval.get(name, 1.0) for name in triggers), default=1.0)

    def note_crossing(self, name: str, step: int) -> None:
        """End an interval of a signal, and begin the next one; when a boundary is looked at again nothing crosses."""
        if self._crossed_at.get(name) == step:
            return
        if name in self._crossed_at:
            interval = float(max(1, step - self._crossed_at[name]))
            past = self._interval.get(name, interval)
            self._interval[name] = NEWEST_WEIGHT * interval + (1 - NEWEST_WEIGHT) * past
        self._crossed_at[name] = step

    def to_record(self) -> dict[str, Any]:
        """Return the state as plain values, for staged state."""
        return {
            "references": dict(self._references),
            "pool": None if self._pool is None else list(self._pool),
            "crossed_at": dict(self._crossed_at),
            "interval": dict(self._interval),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], thresholds: Thresholds | None = None) -> Monitor:
        monitor = cls(thresholds)
        monitor._references = dict(record["references"])
        monitor._pool = None if record["pool"] is None else tuple(record["pool"])
        monitor._crossed_at = dict(record["crossed_at"])
        monitor._interval = dict(record["interval"])
        return monitor


def describe_cap(share_at_cap: float, cap_tokens: int) -> str | None:
    """Return a warning when most responses end at the length cap: that is a training problem, not a matter of plans."""
    if share_at_cap <= SHARE_AT_CAP:
        return None
    return (
        f"{share_at_cap:.0%} of the responses end at the cap of {cap_tokens} tokens: a training problem that no plan "
        "mends; look at the reward, the penalty for a missing EOS, and the KL weight."
    )
