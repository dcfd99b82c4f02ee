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
    assert found[0].work_s <= 1.01 * solved_s
    assert found[0].work_s >= bound_s * (1 - 1e-6)


@pytest.mark.parametrize("seed", [1, 4, 5, 6])
def test_the_solver_finds_no_better_plan(seed: int):
    check_against_the_solver(seed, least_devices=4, most_devices=5, time_limit_s=20)


# Seeds of instances with a plan that fits, and with few enough columns for the solver.
LARGER = (1005, 1006, 1007, 1008, 1017, 1019, 1022, 1025, 1026, 1028, 1029, 1035, 1038, 1039, 1042, 1049, 1053, 1054,
          1057, 1058)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)  # on a busy machine the solver looks at its own limit late
@pytest.mark.parametrize("seed", LARGER)
def test_the_solver_finds_no_better_plan_on_larger_instances(seed: int):
    check_against_the_solver(seed, least_devices=6, most_devices=8, time_limit_s=60)
