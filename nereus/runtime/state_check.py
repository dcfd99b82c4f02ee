"""Whether what was moved by a change of the plan is what it was: the numbers of the step that follows say so."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nereus.alarms import GAP_JUMP, GAP_MOST

# Largest error of the first ratio that exact copies give; log-probs are held against the limits of the training alarms.
MOST_RATIO_ERROR = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2}


class StateAlarm(RuntimeError):
    """The first step after a change of the plan says that what was moved is wrong."""


class StateCheck:
    """Looks at every step, to know what is usual, and judges the first one after a change of the plan."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._largest_gap = 0.0

    def check(self, metrics: Mapping[str, Any], *, is_first: bool) -> None:
        """Take in a step.

        Args:
            metrics: its line of metrics.jsonl.
            is_first: whether the plan has changed right before it.

        Raises:
            StateAlarm: its numbers can't come of an exact copy.
        """
        gap, error = metrics["generation_logprob_gap_max"], metrics["first_ratio_max_error"]
        if is_first and not (gap <= self._most_gap() and error <= MOST_RATIO_ERROR[self._precision]):
            raise StateAlarm(
                f"step {metrics['step']}, the first after a change of the plan: sampler and trainer differ by "
                f"{gap:.1e} in the log-prob of a token, where at most {self._most_gap():.1e} is right, and the first "
                f"ratio is off by {error:.1e}"
            )
        self._largest_gap = max(self._largest_gap, gap)

    def _most_gap(self) -> float:
        if self._precision != "bfloat16":
            return GAP_MOST[self._precision]
        return GAP_JUMP * self._largest_gap or math.inf
