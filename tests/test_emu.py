"""A plan is the set of its units."""

import random

from hypothesis import given
from hypothesis import strategies as st

from nereus.emu import emus_of, plan_of
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, Plan, StagePlan


@st.composite
def stage_plans(draw) -> StagePlan:
    layout = Layout(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dp = draw(st.integers(1, 12))
    devices = tuple(draw(st.permutations(range(120)))[: dp * layout.size])
    return StagePlan(dp, layout, devices, draw(st.integers(1, 8)), draw(st.booleans()))


plans = st.dictionaries(st.sampled_from(MODEL_STAGES), stage_plans(), min_size=1).map(Plan.of)


@given(plans, st.randoms(use_true_random=False))
def test_the_units_of_a_plan_make_the_plan(plan, shuffler: random.Random):
    units = list(emus_of(plan))
    shuffler.shuffle(units)
    assert plan_of(units, like=plan) == plan


def test_what_a_unit_says_of_itself():
    plan = Plan.of({"critic.training": StagePlan(2, Layout(2, 1), (5, 4, 7, 6), 1)})
    unit = emus_of(plan)[1]
    assert (unit.id, unit.role, unit.stage) == ("critic.training/1", "critic", "training")
    assert unit.devices == (7, 6) and unit.rank_of(6) == 1
