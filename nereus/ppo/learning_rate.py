"""Learning rate as a function of the updates done so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LearningRate:
    """A linear warm-up from 0 over `warmup_updates`, then `schedule` down to 0 at `decay_updates`.

    Example: LearningRate(1e-3, warmup_updates=2)(0) is 5e-4, (1) and later 1e-3.
    """

    peak: float
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_updates: int = 0
    decay_updates: int = 1000

    def __call__(self, updates: int) -> float:
        if updates < self.warmup_updates:
            return self.peak * (updates + 1) / self.warmup_updates
        if self.schedule == "constant":
            return self.peak
        done = min(1.0, (updates - self.warmup_updates) / max(1, self.decay_updates - self.warmup_updates))
        return self.peak * (1.0 - done if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done)))
