"""What moves take is learned: prices follow the moves that were measured."""

import pytest

from nereus.controller.prices import MovePrices
from nereus.transition.price import TransitionPrice

PRICE = TransitionPrice(2.0, 3.0, 100, 200)


def learned(*moves: tuple[float, float]) -> MovePrices:
    prices = MovePrices()
    for price_s, seconds in moves:
        prices.observe(price_s, seconds)
    return prices


def test_prices_are_as_predicted_before_the_first_move():
    assert MovePrices().correct(PRICE) == PRICE


def test_what_every_move_costs_is_learned_from_moves_that_should_be_free():
    corrected = learned((0.0, 0.2), (0.0, 0.2)).correct(TransitionPrice(0.0, 0.0))
    assert corrected.direct_s == pytest.approx(0.2, rel=0.05)
    assert corrected.staged_s == corrected.direct_s


def test_prices_that_are_too_high_come_down():
    corrected = learned((0.0, 0.1), (2.0, 0.3), (2.0, 0.3)).correct(PRICE)
    assert corrected.direct_s == pytest.approx(0.3, rel=0.1)
    assert corrected.staged_s == pytest.approx(0.4, rel=0.1)


def test_large_moves_say_nothing_of_what_every_move_costs():
    corrected = learned((10.0, 7.0), (20.0, 14.0)).correct(TransitionPrice(None, 10.0))
    assert corrected.direct_s is None
    assert corrected.staged_s == pytest.approx(7.0, rel=0.05)


def test_prices_survive_staging():
    prices = learned((0.0, 0.1), (2.0, 0.3))
    assert MovePrices(prices.to_record()).correct(PRICE) == prices.correct(PRICE)
