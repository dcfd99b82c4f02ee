"""The search finds what trying every plan finds, and says so when nothing fits."""

from dataclasses import replace

import pytest

from nereus.layout import Layout
from nereus.planner import best_plans
from nereus.planner.fit import Fitter
from nereus.planner.plan_search import without_slow_devices
from nereus.planner.search import find_plans
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


def test_layouts_of_more_devices_than_there_are_give_no_plan():
    """As when all devices but one are slow, and the layouts asked for need two."""
    setting = random_setting(0, most_devices=3)
    one = replace(setting, cluster=setting.cluster.only(setting.cluster.device_ids[:1]))
    assert find_plans(one, dict.fromkeys(setting.job.specs, (Layout(2, 1),)), 1) == []


def test_time_in_which_no_device_works_makes_no_search_longer(monkeypatch: pytest.MonkeyPatch):
    """It is the same for all plans; bounds that leave it out of limits that don't would spare nothing."""
    setting = random_setting(3, most_devices=3)
    fits: list[float] = []
    fit = Fitter.fit
    monkeypatch.setattr(
        Fitter, "fit", lambda self, *args: fits.append(self.setting.efficiencies.step_s) or fit(self, *args)
    )
    for step_s in (0.0, 1000.0):
        found = best_plans(replace(setting, efficiencies=replace(setting.efficiencies, step_s=step_s)), 1)
        assert found[0].step_s == pytest.approx(found[0].cost.total_s) and found[0].step_s > step_s
    assert 0 < fits.count(0.0) == fits.count(1000.0)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_the_space_is_faster(seed: int):
    check_against_all_plans(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12, 200))
def test_no_plan_of_the_space_is_faster_on_many_instances(seed: int):
    check_against_all_plans(seed)
