"""The search finds what trying every plan finds, and says so when nothing fits."""

import pytest

from nereus.planner import best_plans
from nereus.planner.plan_search import without_slow_devices
from tests.planner.exhaustive import Exhaustive
from tests.planner.instances import random_setting


def check_against_all_plans(seed: int) -> None:
    setting = random_setting(seed, most_devices=3)
    of_each = [Exhaustive(some).best() for some in without_slow_devices(setting)]
    expected = min((each for each in of_each if each), key=lambda each: each[0], default=None)
    found = best_plans(setting, 1)
    if expected is None:
        assert not found
        return
    assert found[0].step_s == pytest.approx(expected[0], rel=1e-9), expected[1].describe()
    assert found[0].cost.total_s == pytest.approx(found[0].step_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_the_space_is_faster(seed: int):
    check_against_all_plans(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 200))
def test_no_plan_of_the_space_is_faster_on_many_instances(seed: int):
    check_against_all_plans(seed)
