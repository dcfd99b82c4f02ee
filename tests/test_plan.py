"""Plans: records, lookups, and the one sentence that says what is wrong with an illegal one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import MODEL_STAGES, Plan, StagePlan, check_plan

SPEC = ModelSpec("llama", 64, 32, 4, 4, 2, 8, 64)
SPECS = {"actor.generation": SPEC, "actor.training": SPEC, "critic.training": replace(SPEC, head="value")}


@st.composite
def stage_plans(draw) -> StagePlan:
    layout = Layout(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dp = draw(st.integers(1, 3))
    devices = tuple(draw(st.permutations(range(30)))[: dp * layout.size])
    return StagePlan(dp, layout, devices, draw(st.integers(1, 8)), draw(st.booleans()))


plans = st.dictionaries(st.sampled_from(MODEL_STAGES), stage_plans(), min_size=1).map(Plan.of)


@given(plans)
def test_a_plan_is_its_record(plan):
    assert Plan.from_record(plan.to_record()) == plan
    assert list(plan) == [name for name in MODEL_STAGES if name in plan]


def test_replicas_are_consecutive_devices_in_rank_order():
    stage = StagePlan(2, Layout(2, 1), (3, 1, 0, 2), 4)
    assert stage.replicas == ((3, 1), (0, 2))


def test_with_stage_changes_one_model_stage_only():
    plan = _plan()
    changed = plan.with_stage("actor.training", recompute=True)
    assert changed["actor.training"].recompute
    assert changed["critic.training"] == plan["critic.training"]
    assert plan.devices == (0, 1)
    assert "actor.generation 2x1x1 on 0,1" in plan.describe()
    with pytest.raises(KeyError):
        plan["reference.inference"]


def _plan(**changes) -> Plan:
    stage = StagePlan(2, Layout(), (0, 1), 4)
    return Plan.of({name: replace(stage, **changes) if name == "actor.training" else stage for name in SPECS})


def _check(plan: Plan, specs=SPECS) -> None:
    check_plan(plan, specs, (0, 1, 2, 3), samples_per_step=8, minibatch_samples=2)


def test_a_legal_plan_passes():
    _check(_plan())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": Layout(3, 1)}, r"plan\.actor\.training: tp=3 is more than the model's 2 KV heads; choose tp <= 2"),
        ({"layout": Layout(1, 5)}, r"pp=5 is more than the model's 4 layers"),
        ({"dp": 0, "devices": ()}, r"dp=0, micro_batch=4; both must be at least 1"),
        ({"micro_batch": 0}, r"dp=2, micro_batch=0; both must be at least 1"),
        ({"devices": (0, 1, 2)}, r"dp\*tp\*pp = 2\*1\*1 needs 2 devices, but `devices` lists 3; list exactly 2 ids"),
        ({"devices": (1, 1)}, r"device 1 is listed twice"),
        ({"devices": (0, 7)}, r"asks for device 7, but there are 4 devices \(0\.\.3\); .* raise `cluster.devices`"),
        ({"dp": 3, "devices": (0, 1, 2)}, r"dp=3 is more than the 2 samples of a minibatch; choose dp <= 2"),
    ],
)
def test_an_illegal_plan_is_refused_in_one_sentence(changes, words):
    with pytest.raises(ValueError, match=words):
        _check(_plan(**changes))


def test_the_plan_names_exactly_the_runs_model_stages():
    with pytest.raises(ValueError, match=r"leaves out `reference\.inference`"):
        _check(_plan(), {**SPECS, "reference.inference": SPEC})
    with pytest.raises(ValueError, match=r"names `critic\.training`, which this run has not"):
        _check(_plan(), dict.fromkeys(("actor.generation", "actor.training"), SPEC))


def test_generation_may_have_a_replica_for_each_sample_of_the_step():
    stage = StagePlan(4, Layout(), (0, 1, 2, 3), 4)
    _check(Plan.of({**dict(_plan().items()), "actor.generation": stage}))
