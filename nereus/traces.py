"""Traces: how many devices there are at each step, and how long responses get.

Everything here takes plain values and text; finding files is `trace_files`'s.
"""

from __future__ import annotations

import csv
import io
import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pool:
    """The devices 0..num_devices-1 of one step; `lost`: the missing ones went without notice, during that step."""

    num_devices: int
    lost: bool = False


@dataclass(frozen=True)
class LengthTrace:
    """Response lengths by step: (step, mean, p95 or None) points, linear between them and constant beyond."""

    points: tuple[tuple[float, float, float | None], ...]
    p95_over_mean: float

    def mean(self, step: int) -> float:
        """Return the mean response length of a step in tokens."""
        return _interpolate([(at, mean) for at, mean, _ in self.points], step)

    def p95(self, step: int) -> float:
        """Return the 95th percentile of the response length of a step in tokens."""
        return _interpolate([(at, p95 or mean * self.p95_over_mean) for at, mean, p95 in self.points], step)


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    index = bisect_right([x for x, _ in points], at)
    if index == 0:
        return points[0][1]
    if index == len(points):
        return points[-1][1]
    (x0, y0), (x1, y1) = points[index - 1], points[index]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def build_lengths(points: Sequence[Sequence[float]], p95_over_mean: float, where: str) -> LengthTrace:
    """Return a length trace of `[step, mean]` or `[step, mean, p95]` points.

    Raises:
        ValueError: no point, steps that are negative or don't increase, or a length that isn't above 0.
    """
    if not points:
        raise ValueError(f"{where} is empty; give at least one [step, mean].")
    checked: list[tuple[float, float, float | None]] = []
    for point in points:
        if len(point) not in (2, 3):
            raise ValueError(f"{where} holds {list(point)}; a point is [step, mean] or [step, mean, p95].")
        step, mean, p95 = point[0], point[1], point[2] if len(point) == 3 else None
        if step < 0 or (checked and step <= checked[-1][0]):
            raise ValueError(f"{where} has step {step:g} out of order; steps start at 0 or above and increase.")
        if not (math.isfinite(mean) and mean > 0) or (p95 is not None and p95 < mean):
            raise ValueError(
                f"{where} at step {step:g} is {list(point)}; means must be above 0 and p95 not below them."
            )
        checked.append((step, mean, p95))
    return LengthTrace(tuple(checked), p95_over_mean)


def read_lengths_csv(text: str, where: str) -> list[list[float]]:
    """Return the points of a CSV with the columns step,mean and perhaps p95."""
    rows = _read_csv(text, where, ("step", "mean"))
    return [[row[key] for key in ("step", "mean", "p95") if key in row] for row in rows]


def build_pools(entries: Sequence[Sequence[Any]], num_steps: int, where: str) -> tuple[Pool, ...]:
    """Return the pool of every step from `[step, n]` and `[step, n, "lost"]` entries; each holds from its step on.

    Raises:
        ValueError: no entry at step 0, steps that are negative or don't increase, or never a device.
    """
    changes: dict[int, Pool] = {}
    last = -1
    for entry in entries:
        if len(entry) not in (2, 3) or (len(entry) == 3 and entry[2] != "lost"):
            raise ValueError(f"{where} holds {list(entry)}; an entry is [step, devices] or [step, devices, lost].")
        step, count = entry[0], entry[1]
        if step != int(step) or step < 0 or step <= last:
            raise ValueError(f"{where} has step {step} out of order; steps are whole, start at 0 and increase.")
        if count != int(count) or count < 0:
            raise ValueError(f"{where} has {count} devices at step {step}; give a whole number of at least 0.")
        last = int(step)
        changes[last] = Pool(int(count), len(entry) == 3)
    if 0 not in changes:
        raise ValueError(f"{where} says nothing of step 0; let its first entry be [0, devices].")
    pools, pool = [], changes[0]
    for step in range(num_steps):
        pool = changes.get(step, Pool(pool.num_devices))
        pools.append(pool)
    return _check_pools(pools, where)


def sample_pools(
    trace: Sequence[tuple[float, float]],
    num_steps: int,
    where: str,
    *,
    scale: float = 1.0,
    least: int = 0,
    most: int | None = None,
    span_s: float | None = None,
) -> tuple[Pool, ...]:
    """Return the pool of every step from a trace of (seconds, available): step i is at `i * span_s / num_steps`.

    Args:
        scale, least, most: devices = scale * available, cut to [least, most].
        span_s: seconds that the steps are spread over; None: the whole trace.
    """
    check_times(trace, where)
    times = [seconds for seconds, _ in trace]
    span = span_s if span_s is not None else times[-1] + (times[-1] - times[-2] if len(times) > 1 else 1.0)
    pools = []
    for step in range(num_steps):
        index = max(0, bisect_right(times, times[0] + step * span / num_steps) - 1)
        count = max(least, int(scale * trace[index][1]))
        pools.append(Pool(count if most is None else min(count, most)))
    return _check_pools(pools, where)


def check_times(trace: Sequence[tuple[float, float]], where: str) -> None:
    """Raise ValueError when a trace is empty or its times are negative or don't increase."""
    if not trace:
        raise ValueError(f"{where} holds no line; give at least one `seconds,available`.")
    for index, (seconds, available) in enumerate(trace):
        if seconds < 0:
            raise ValueError(f"{where} has the negative time {seconds:g}; times start at 0.")
        if index and seconds <= trace[index - 1][0]:
            raise ValueError(
                f"{where} goes from {trace[index - 1][0]:g} s back to {seconds:g} s; sort it by time, each time once."
            )
        if available < 0:
            raise ValueError(f"{where} has {available:g} devices at {seconds:g} s; give at least 0.")


def read_devices_csv(text: str, where: str) -> list[tuple[float, float]]:
    """Return (seconds, available) of a CSV with these columns."""
    return [(row["seconds"], row["available"]) for row in _read_csv(text, where, ("seconds", "available"))]


def read_spot_trace(text: str, where: str) -> list[tuple[float, float]]:
    """Return (seconds, available) of a trace of github.com/skypilot-org/spot-traces.

    Its JSON holds `metadata.gap_seconds` and in `data` the number of available instances at each tick.
    """
    try:
        tree = json.loads(text)
        gap, data = float(tree["metadata"]["gap_seconds"]), [float(count) for count in tree["data"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{where} is no spot trace; it needs `metadata.gap_seconds` and a list `data`.") from None
    if not (math.isfinite(gap) and gap > 0):
        raise ValueError(f"{where} has gap_seconds {gap:g}; it must be above 0.")
    if not all(map(math.isfinite, data)):
        raise ValueError(f"{where} has an entry of `data` that isn't finite; give whole numbers.")
    return [(index * gap, count) for index, count in enumerate(data)]


def _check_pools(pools: Sequence[Pool], where: str) -> tuple[Pool, ...]:
    if not any(pool.num_devices for pool in pools):
        raise ValueError(f"{where} has 0 devices for ever; let there be some at some step.")
    return tuple(pools)


def _read_csv(text: str, where: str, needed: Sequence[str]) -> list[dict[str, float]]:
    reader = csv.DictReader(io.StringIO(text))
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise ValueError(f"{where} has no column `{missing[0]}`; its first line must be {','.join(needed)}.")
    rows = []
    for row in reader:
        try:
            numbers = {key: float(value) for key, value in row.items()}
        except (TypeError, ValueError):
            raise ValueError(f"{where} has a line that is no numbers ({row}); mend it.") from None
        if not all(map(math.isfinite, numbers.values())):
            raise ValueError(f"{where} has a line with a number that isn't finite ({row}); mend it.")
        rows.append(numbers)
    return rows
