"""Admission rules as functions of latencies and prices."""

import math

import pytest

from nereus.controller.admission import Option, admit_any_gain, admit_payback, payback_steps, pick_urgent


def test_payback_is_the_price_over_the_gain():
    assert payback_steps(100, Option(90, 20)) == 2.0
    assert payback_steps(100, Option(100, 20)) == math.inf
    assert payback_steps(100, Option(110, 0)) == math.inf


@pytest.mark.parametrize(("horizon", "admitted"), [(3.9, None), (4.0, 0)])
def test_payback_admits_at_gamma_times_the_horizon(horizon: float, admitted: int | None):
    assert admit_payback(100, [Option(90, 20)], gamma=0.5, horizon=horizon) == admitted


def test_gamma_0_admits_nothing_even_when_a_move_is_free():
    assert admit_payback(100, [Option(1, 0)], gamma=0.0, horizon=100) is None
    assert admit_payback(100, [Option(1, 0)], gamma=0.1, horizon=1) == 0


def test_the_best_plan_goes_before_cheaper_ones_when_it_pays():
    assert admit_payback(100, [Option(80, 9), Option(81, 0)], gamma=0.5, horizon=1) == 0


def test_slower_plans_with_cheaper_moves_are_tried_when_the_best_is_refused():
    options = [Option(80, 30), Option(85, 7), Option(86, 1), Option(101, 0)]
    assert admit_payback(100, options, gamma=0.5, horizon=1) == 2
    assert admit_payback(100, options, gamma=0.5, horizon=0.2) == 2
    assert admit_payback(100, options, gamma=0.5, horizon=0.01) is None


def test_any_gain_asks_for_no_more_than_a_gain():
    assert admit_any_gain(100, [Option(99.999, 1e9)], gamma=0.5, horizon=1) == 0
    assert admit_any_gain(100, [Option(100, 0)], gamma=0.5, horizon=1) is None


def test_urgent_waives_profit_but_not_cost():
    options = [Option(80, 30), Option(81, 1)]
    assert pick_urgent(options, gamma=0.5, horizon=1) == 1
    assert pick_urgent(options, gamma=0.5, horizon=100) == 0
    assert pick_urgent(options, gamma=0.0, horizon=100) == 1
