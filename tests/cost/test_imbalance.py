"""The fullest share as it is predicted, beside shares that samples of random lengths were really given."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nereus.cost.imbalance import fullest_share_excess
from nereus.ppo.batching import share_out

MEAN, DEVIATION = 100.0, 25.0


@pytest.mark.parametrize(
    ("samples", "shares"), [(2, 2), (4, 2), (8, 2), (4, 4), (8, 4), (16, 4), (64, 16)], ids=lambda number: str(number)
)
def test_the_fullest_share_is_what_samples_come_to_that_are_shared_out(samples: int, shares: int):
    lengths = np.random.default_rng(1).normal(MEAN, DEVIATION, (1000, samples))
    fullest = [max(sum(row[i] for i in share) for share in share_out(row.tolist(), shares)) for row in lengths]
    excess = float(fullest_share_excess(samples, np.array([shares]))[0])
    assert samples / shares * MEAN + excess * DEVIATION == pytest.approx(np.mean(fullest), rel=0.01)


def test_of_two_samples_the_longer_one():
    assert fullest_share_excess(2, np.array([2]))[0] == pytest.approx(1 / math.sqrt(math.pi), rel=0.05)


def test_one_share_and_very_many_samples_exceed_nothing():
    assert fullest_share_excess(8, np.array([1, 8, 1])).tolist()[::2] == [0.0, 0.0]
    assert fullest_share_excess(10_000, np.array([2, 4])).tolist() == [0.0, 0.0]


def test_it_is_looked_up_by_pair():
    both = fullest_share_excess(np.array([4.0, 8.0]), np.array([4.0, 2.0]))
    alone = [float(fullest_share_excess(n, np.array([m]))[0]) for n, m in ((4, 4), (8, 2))]
    assert both.tolist() == alone
