"""Admission rules: whether a move pays, as pure functions over predicted latencies and transition prices.

An option's latency is that of a step under its plan; its price, the seconds that the move to it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

RULES = ("payback", "any_gain", "every_k", "fixed")


@dataclass(frozen=True)
class Option:
    """What a rule sees of a candidate plan; options come best latency first."""

    latency_s: float
    transition_s: float


def payback_steps(current_s: float, option: Option) -> float:
    """Return the steps after which a move has earned its price; infinite when it earns nothing."""
    gain = current_s - option.latency_s
    return option.transition_s / gain if gain > 0 else math.inf


def admit_payback(current_s: float, options: Sequence[Option], *, gamma: float, horizon: float) -> int | None:
    """Return the first option, else the best cheaper one, whose payback is within `gamma * horizon` steps.

    Among slower options the one that saves most over these steps is taken. gamma = 0 admits none.
    """
    admitted = [
        index
        for index, option in enumerate(options)
        if gamma > 0 and payback_steps(current_s, option) <= gamma * horizon
    ]
    if 0 in admitted:
        return 0
    return min(admitted, key=lambda index: score(options[index], gamma=gamma, horizon=horizon), default=None)


def admit_any_gain(current_s: float, options: Sequence[Option], *, gamma: float, horizon: float) -> int | None:
    """Return the first option when it is faster at all."""
    return 0 if options and options[0].latency_s < current_s else None


def pick_urgent(options: Sequence[Option], *, gamma: float, horizon: float) -> int:
    """Return the option to take when the current plan can't run: profit is waived, cost isn't.

    One option beats another when its extra price is paid back within `gamma * horizon` steps; the score says the same
    for all pairs at once.
    """
    return min(range(len(options)), key=lambda index: score(options[index], gamma=gamma, horizon=horizon))


def score(option: Option, *, gamma: float, horizon: float) -> float:
    """Return the seconds of a move and of the `gamma * horizon` steps that it must pay back in."""
    return option.transition_s + gamma * horizon * option.latency_s


Rule = Callable[..., int | None]
ADMIT: dict[str, Rule] = {
    "payback": admit_payback,
    "any_gain": admit_any_gain,
    "every_k": admit_any_gain,
    "fixed": admit_any_gain,
}
