"""Efficiencies learned from measured times: every measurement, on whatever plan, improves the prediction of all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from nereus.cost.device_factors import DeviceFactors
from nereus.cost.efficiency import CLASSES, CONSERVATIVE, Efficiencies
from nereus.cost.memory_factor import MemoryFactor
from nereus.cost.operations import COMPUTE_CLASSES, Array, Operations

# A guess is wrong by this factor, or less, in two of three cases.
PRIOR_FACTOR = 2.0
# Scatter of measured times about the truth, relative.
NOISE = 0.03
# Measurements count half as much after so many steps, and leave after WINDOW_STEPS: hardware changes.
HALF_LIFE_STEPS = 8
WINDOW_STEPS = 24
# What a step takes beside its tasks is the median of so many newest ones.
_KEPT_RESTS = 9

_NUM = len(CLASSES)
_IN_DEVICE = np.array([name in COMPUTE_CLASSES for name in CLASSES] * 2 + [True])


@dataclass(frozen=True)
class Observation:
    """A measured time: the latencies and work by class it is made of (and host passes last), [2 * classes + 1]."""

    step: int
    amounts: Array
    seconds: float

    def to_record(self) -> dict[str, Any]:
        return {"step": self.step, "amounts": self.amounts.tolist(), "seconds": self.seconds}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Observation:
        return cls(record["step"], np.asarray(record["amounts"], np.float64), record["seconds"])


class Calibration:
    """Efficiencies and latencies of all classes, the factors of slow devices, and the correction of memory peaks.

    Before the first measurement it answers with the guess it was made with. The unknowns are the logarithms of
    1 / efficiency and latency of each class and of the host's overhead; their estimate is the most probable one given
    a log-normal guess and measurements with Student-t errors, which outliers hardly move.

    Example:
        calibration = Calibration()
        calibration.observe(step, operations, seconds, devices)   # any piece of a step whose time is known
        estimate_step(plan, job, cluster, calibration.efficiencies())
    """

    def __init__(self, guess: Efficiencies = CONSERVATIVE) -> None:
        self._mean = _to_logs(guess)
        self._logs, self._deviations = self._mean, np.full(len(self._mean), math.log(PRIOR_FACTOR))
        self._observations: list[Observation] = []
        self._is_stale = False
        self.devices = DeviceFactors(guess.device_factor)
        self.memory = MemoryFactor()
        self._rest_s: list[float] = [guess.step_s] if guess.step_s else []

    def observe_rest(self, seconds: float) -> None:
        """Take in the seconds of a step that none of its tasks accounts for."""
        self._rest_s = [*self._rest_s, max(0.0, seconds)][-_KEPT_RESTS:]

    def observe(self, step: int, operations: Operations, seconds: float, devices: Sequence[int] = ()) -> None:
        """Take in the measured seconds of some operations (scalars) that ran on `devices` in step `step`.

        What has no operations or took no time says nothing and is ignored.
        """
        slowdown = self.devices.slowdown(devices)
        amounts = _amounts(operations) * np.where(_IN_DEVICE, slowdown, 1.0)
        if seconds > 0 and amounts.any():
            self._observations.append(Observation(step, amounts, seconds))
            self._is_stale = True

    def efficiencies(self) -> Efficiencies:
        """Return the present estimate."""
        self._fit()
        numbers = np.exp(self._logs)
        return Efficiencies(
            efficiency=dict(zip(CLASSES, (1.0 / numbers[:_NUM]).tolist(), strict=True)),
            latency_s=dict(zip(CLASSES, numbers[_NUM : 2 * _NUM].tolist(), strict=True)),
            host_s=float(numbers[-1]),
            device_factor=self.devices.factors(),
            step_s=median(self._rest_s) if self._rest_s else 0.0,
        )

    def uncertainty(self) -> dict[str, float]:
        """Return by class the relative standard deviation of its efficiency; it shrinks as measurements come in."""
        self._fit()
        return dict(zip(CLASSES, np.expm1(self._deviations[:_NUM]).tolist(), strict=True))

    def _fit(self) -> None:
        if not self._is_stale:
            return
        newest = max(one.step for one in self._observations)
        kept = [one for one in self._observations if one.step > newest - WINDOW_STEPS]
        if len(kept) < len(self._observations):
            # What the dropped ones taught lives on as the guess: classes that aren't seen any more stay as they are.
            self._mean, self._observations = self._logs, kept
        amounts = np.stack([one.amounts for one in kept])
        seconds = np.log([one.seconds for one in kept])
        weights = 0.5 ** ((newest - np.array([one.step for one in kept])) / HALF_LIFE_STEPS)
        self._logs, self._deviations = _most_probable(self._mean, amounts, seconds, weights)
        self._is_stale = False

    def to_record(self) -> dict[str, Any]:
        """Return all of it as plain values for JSON."""
        self._fit()
        return {
            "mean": self._mean.tolist(),
            "logs": self._logs.tolist(),
            "deviations": self._deviations.tolist(),
            "observations": [one.to_record() for one in self._observations],
            "devices": self.devices.to_record(),
            "memory": self.memory.to_record(),
            "rest_s": list(self._rest_s),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Calibration:
        self = cls()
        self._mean = np.asarray(record["mean"], np.float64)
        self._logs = np.asarray(record["logs"], np.float64)
        self._deviations = np.asarray(record["deviations"], np.float64)
        self._observations = [Observation.from_record(one) for one in record["observations"]]
        self.devices = DeviceFactors.from_record(record["devices"])
        self.memory = MemoryFactor.from_record(record["memory"])
        self._rest_s = list(record["rest_s"])
        return self


def _to_logs(guess: Efficiencies) -> Array:
    inverse = [1.0 / guess.efficiency[name] for name in CLASSES]
    # A latency of 0 can't be scaled up; a nanosecond is as good.
    latency = [max(guess.latency_s[name], 1e-9) for name in CLASSES]
    return np.log([*inverse, *latency, max(guess.host_s, 1e-9)])


def _amounts(operations: Operations) -> Array:
    work = [float(operations.work_s.get(name, 0.0)) for name in CLASSES]
    count = [float(operations.count.get(name, 0.0)) for name in CLASSES]
    return np.array([*work, *count, float(operations.host)])


def _most_probable(mean: Array, amounts: Array, seconds: Array, weights: Array) -> tuple[Array, Array]:
    """Return the most probable logs and their standard deviations.

    Gauss-Newton on log(seconds) = log(amounts @ exp(logs)) + error. Errors are weighted as Huber's (convex: no start is
    too far off), then as Student's t with 3 degrees of freedom (outliers count for nothing).
    Source: Holland and Welsch 1977, Commun. Stat. A6, for iterated weights.
    """
    logs = mean.copy()
    prior = np.full(len(mean), math.log(PRIOR_FACTOR) ** -2)
    hessian = np.diag(prior)
    for weigh in (_huber, _student):
        for _ in range(30):
            terms = amounts * np.exp(logs)
            predicted = terms.sum(axis=1)
            shares = terms / predicted[:, None]
            errors = seconds - np.log(predicted)
            weighted = shares * (weights * weigh(np.abs(errors) / NOISE) / NOISE**2)[:, None]
            hessian = np.diag(prior) + weighted.T @ shares
            move = np.linalg.solve(hessian, weighted.T @ errors + prior * (mean - logs))
            logs = logs + np.clip(move, -1.0, 1.0)
            if np.abs(move).max() < 1e-4:
                break
    return logs, np.sqrt(np.diag(np.linalg.inv(hessian)))


def _huber(scaled: Array) -> Array:
    return np.minimum(1.0, 1.5 / np.maximum(scaled, 1e-12))


def _student(scaled: Array) -> Array:
    return 4.0 / (3.0 + scaled**2)
