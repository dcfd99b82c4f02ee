"""The search against HiGHS on instances too large to try every plan."""

import math

import pytest

pytest.importorskip("scipy")

from nereus.planner.search import find_plans
from nereus.planner.space import layouts_for
from tests.planner.instances import random_setting
from tests.planner.milp import PlanProgram


def check_against_the_solver(seed: int, *, least_devices: int, most_devices: int, time_limit_s: float) -> None:
    setting = random_setting(seed, least_devices=least_devices, most_devices=most_devices)
    solved_s, bound_s = PlanProgram(setting).solve(time_limit_s=time_limit_s)
    layouts = {name: layouts_for(spec, len(setting.order)) for name, spec in setting.job.specs.items()}
    found = find_plans(setting, layouts, 1)
    if math.isinf(bound_s):
        assert not found
        return
    assert found[0].total_s <= 1.01 * solved_s
    # The program knows all but the buffers of the weight sync, so nothing that exists is faster than it.
    assert found[0].total_s >= bound_s * (1 - 1e-6)


@pytest.mark.parametrize("seed", [1, 4, 5, 6])
def test_the_solver_finds_no_better_plan(seed: int):
    check_against_the_solver(seed, least_devices=4, most_devices=5, time_limit_s=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 60))
def test_the_solver_finds_no_better_plan_on_larger_instances(seed: int):
    check_against_the_solver(seed, least_devices=6, most_devices=8, time_limit_s=60)
