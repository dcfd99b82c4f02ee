"""The correction of predicted memory peaks by measured ones: a factor that errs on the safe side."""

from __future__ import annotations

import math
from typing import Any

# Relative standard deviations: of the prediction's error before anything was measured, and of one measurement.
_PRIOR = 0.05
_NOISE = 0.02
# Two standard deviations above the estimate: one peak in forty is higher.
_SAFETY = 2.0
# Newest measurements that count, and the least that a prediction is corrected to.
_KEPT = 64
_LEAST = 0.8


class MemoryFactor:
    """What a predicted peak is multiplied by, so that the true one is hardly ever above.

    The logarithm of measured / predicted is taken as normal, with mean 0 before the first measurement. Its posterior
    narrows with every measurement, and so does the margin; a single peak above the estimate lifts it at once.
    """

    def __init__(self) -> None:
        self._ratios: list[float] = []
        self._lacks: list[float] = []  # least ratios of peaks that were too high, and weren't measured

    def observe(self, predicted_bytes: float, measured_bytes: float) -> None:
        """Take in the peak of one device in one step. What has no prediction or no measurement is ignored."""
        if predicted_bytes > 0 and measured_bytes > 0:
            self._ratios = [*self._ratios, measured_bytes / predicted_bytes][-_KEPT:]

    def observe_lack(self, predicted_bytes: float, least_bytes: float) -> None:
        """Take in that an allocation failed: the peak would have been at least so high."""
        if predicted_bytes > 0:
            self._lacks = [*self._lacks, least_bytes / predicted_bytes][-_KEPT:]

    def forgive(self) -> bool:
        """Forget allocations that failed, where nothing fits otherwise; return whether there were any."""
        were_any, self._lacks = bool(self._lacks), []
        return were_any

    def factor(self) -> float:
        """Return the factor: about 1.11 before the first measurement."""
        margin = _SAFETY * math.sqrt(1.0 / self._precision + (_NOISE**2 if self._ratios else 0.0))
        return max(_LEAST, self.ratio() * math.exp(margin), *self._ratios, *self._lacks)

    def ratio(self) -> float:
        """Return what measured / predicted is most likely to be, without a margin; 1 before the first measurement."""
        return math.exp(sum(math.log(ratio) for ratio in self._ratios) * _NOISE**-2 / self._precision)

    @property
    def _precision(self) -> float:
        return _PRIOR**-2 + len(self._ratios) * _NOISE**-2

    def to_record(self) -> dict[str, list[float]]:
        return {"ratios": list(self._ratios), "lacks": list(self._lacks)}

    @classmethod
    def from_record(cls, record: Any) -> MemoryFactor:
        self = cls()
        self._ratios = [float(ratio) for ratio in record["ratios"]]
        self._lacks = [float(ratio) for ratio in record["lacks"]]
        return self
