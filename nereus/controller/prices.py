"""What moves really take: prices as predicted, corrected by the moves that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nereus.transition.price import TransitionPrice

# Before the first move: nothing comes on top of a price, give or take so many seconds, and the price is right, give or
# take this share of it.
_BASE_DEVIATION_S = 0.3
_FACTOR_DEVIATION = 0.5
# Scatter of measured moves, relative.
_NOISE = 0.25
# Moves that are remembered: prices of earlier ones were made with rates that have been corrected since.
_KEPT_MOVES = 8


class MovePrices:
    """Seconds of a move as base + factor * price: the most probable base and factor given the moves so far.

    A price knows bytes and communicators. What each move costs beside them, such as the commands themselves and the
    wait for a pending commit, is nothing to a large model and nearly all to a small one, so it is learned.
    """

    def __init__(self, measured: Sequence[Sequence[float]] = ()) -> None:
        """Args: measured: (price as predicted, seconds it took) of every move."""
        self._measured = [(float(price_s), float(seconds)) for price_s, seconds in measured][-_KEPT_MOVES:]

    def observe(self, price_s: float, seconds: float) -> None:
        """Take in what a move took whose uncorrected price was `price_s`."""
        self._measured = [*self._measured, (price_s, seconds)][-_KEPT_MOVES:]

    def correct(self, price: TransitionPrice) -> TransitionPrice:
        """Return the price of a move in the seconds that are to be expected."""
        if not self._measured:
            return price
        base_s, factor = self._line()
        direct_s = None if price.direct_s is None else base_s + factor * price.direct_s
        staged_s = base_s + factor * price.staged_s if math.isfinite(price.staged_s) else math.inf
        return replace(price, direct_s=direct_s, staged_s=staged_s)

    def _line(self) -> tuple[float, float]:
        """Return base and factor; normal errors, so that they solve two linear equations."""
        prices, seconds = np.array(self._measured).T
        inputs = np.stack([np.ones_like(prices), prices], axis=1)
        weights = 1.0 / (_NOISE * np.maximum(seconds, 1e-3)) ** 2
        prior = np.array([_BASE_DEVIATION_S, _FACTOR_DEVIATION]) ** -2.0
        matrix = np.diag(prior) + inputs.T @ (weights[:, None] * inputs)
        base_s, factor = np.linalg.solve(matrix, inputs.T @ (weights * seconds) + prior * np.array([0.0, 1.0]))
        return max(0.0, float(base_s)), max(0.0, float(factor))

    def to_record(self) -> list[list[float]]:
        """Return the moves so far, for staged state."""
        return [list(one) for one in self._measured]
