"""What a search keeps: the fastest plans so far, and inference pairs that are known not to fit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from nereus.layout import Layout
from nereus.plan import stage_of
from nereus.planner.fit import Fitted
from nereus.planner.pairs import Pairs


@dataclass
class Found:
    """The fastest plans so far, at most `count`, fastest first; one faster by less than the share `slack` is missed.

    With `by_layouts` no two have the same layouts in training and generation; else they may differ in dp alone.
    """

    count: int
    slack: float = 0.0
    by_layouts: bool = False
    plans: list[Fitted] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        """What a plan must be faster than to be looked for."""
        return self.plans[-1].work_s * (1.0 - self.slack) if len(self.plans) == self.count else np.inf

    def add(self, fitted: Fitted) -> None:
        if self.by_layouts:
            like = [plan for plan in self.plans if _layouts_of(plan) == _layouts_of(fitted)]
            if like and like[0].work_s <= fitted.work_s:
                return
            self.plans = [plan for plan in self.plans if plan not in like]
        self.plans.append(fitted)
        self.plans.sort(key=lambda each: each.work_s)
        del self.plans[self.count :]


def _layouts_of(fitted: Fitted) -> dict[str, Layout]:
    return {name: place.layout for name, place in fitted.places.items() if stage_of(name) != "inference"}


class Refused:
    """Inference pairs that don't fit: then those with the same layouts on more devices at the same place don't."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._known: list[tuple[int, int, bool, int, int]] = []

    @property
    def is_empty(self) -> bool:
        return not self._known

    def _describe(self, index: int) -> tuple[int, int, bool, int, int]:
        pairs = self._pairs
        first, second = int(pairs.first[index]), int(pairs.second[index])
        one, two = pairs.first_table.rows, pairs.second_table.rows
        return (
            int(one.layout[first]),
            int(two.layout[second]),
            bool(pairs.side[index]),
            int(one.devices[first]),
            int(two.devices[second]),
        )

    def add(self, index: int) -> None:
        self._known.append(self._describe(index))

    def covers(self, index: int) -> bool:
        first, second, side, one, two = self._describe(index)
        return any(
            (first, second, side) == known[:3] and two >= known[4] and (one == known[3] if side else one >= known[3])
            for known in self._known
        )
