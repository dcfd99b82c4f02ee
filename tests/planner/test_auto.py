"""Which plan `auto` takes as memory shrinks, and how a plan given by hand is completed."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.cost.memory import Workload, estimate_memory, fits
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import check_plan
from nereus.planner import plan_auto, resolve_plan

SMOLLM2 = ModelSpec("llama", 49_152, 576, 30, 9, 3, 64, 1_536, tie_embeddings=True)
SPECS = {
    "actor.generation": SMOLLM2,
    "actor.training": SMOLLM2,
    "critic.training": replace(SMOLLM2, head="value"),
    "reference.inference": SMOLLM2,
}
WORK = Workload(samples_per_step=32, minibatches=2, prompt_tokens=128, response_tokens=128)
MIB, GIB = 2**20, 2**30
NOTHING_SAID: dict[str, dict] = {name: {} for name in SPECS}


def _auto(capacity: int, devices: int = 4, **kwargs):
    return plan_auto(SPECS, dict.fromkeys(range(devices), capacity), WORK, "float32", **kwargs)


def test_with_room_every_model_stage_has_a_replica_on_each_device():
    plan = _auto(100 * GIB)
    for name, stage in plan.items():
        assert (stage.dp, stage.layout, stage.devices) == (4, Layout(), (0, 1, 2, 3))
        assert stage.micro_batch == WORK.share(name, 4) and not stage.recompute


def test_as_memory_shrinks_micro_batches_halve_then_pipelines_grow_until_nothing_fits():
    seen = []
    for capacity in range(12 * GIB, GIB, -16 * MIB):
        try:
            plan = _auto(capacity)
        except ValueError as error:
            assert "plan needs" in str(error) and "pp" in str(error)
            break
        training = plan["actor.training"]
        if not seen or seen[-1] != (training.layout.pp, training.micro_batch, training.recompute):
            seen.append((training.layout.pp, training.micro_batch, training.recompute))
        assert fits(plan, SPECS, WORK, "float32", dict.fromkeys(range(4), capacity))
    else:
        pytest.fail("1 GiB was enough for four model-stages of 135 million parameters")
    stages = [pp for pp, _, _ in seen]
    assert stages == sorted(stages) and set(stages) == {1, 2, 4}
    alone = [(micro_batch, recompute) for pp, micro_batch, recompute in seen if pp == 1]
    assert alone == [(4, False), (2, False), (1, False), (4, True), (2, True), (1, True)]


def test_the_number_of_slots_is_what_memory_allows():
    work = replace(WORK, samples_per_step=1024, minibatches=512, response_tokens=1000)
    slots = [
        plan_auto(SPECS, {0: capacity * GIB}, work, "float32")["actor.generation"].micro_batch
        for capacity in (8, 10, 40)
    ]
    assert 1 < slots[0] < slots[1] < slots[2]


def test_dp_is_at_most_the_samples_there_are():
    work = replace(WORK, samples_per_step=5, minibatches=2)
    plan = plan_auto(SPECS, dict.fromkeys(range(8), 100 * GIB), work, "float32")
    assert plan["actor.training"].dp == 2  # the smaller minibatch has 2 samples
    assert plan["actor.generation"].dp == plan["reference.inference"].dp == 5


def test_a_named_micro_batch_is_kept_and_recomputation_tried_for_it():
    plan = _auto(100 * GIB, micro_batch=3)
    assert {plan[name].micro_batch for name in SPECS if name != "actor.generation"} == {3}
    assert plan["actor.generation"].micro_batch == WORK.share("actor.generation", 4)
    plans = [_auto(capacity, micro_batch=4)["actor.training"] for capacity in range(9 * GIB, 5 * GIB, -64 * MIB)]
    assert {plan.micro_batch for plan in plans} == {4}
    choices = list(dict.fromkeys((plan.layout.pp, plan.recompute) for plan in plans))
    assert choices[:3] == [(1, False), (1, True), (2, False)]


def test_devices_that_no_pipeline_needs_stay_idle():
    plan = _auto(4 * GIB, devices=3)
    assert plan["actor.training"].layout == Layout(1, 2) and plan.devices == (0, 1)


def test_one_device_and_too_little_memory_names_the_numbers():
    with pytest.raises(ValueError, match=r"plan needs .* GiB on device 0 .*raise cluster\.memory_per_device"):
        _auto(2 * GIB, devices=1)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(2, 64), st.integers(1, 64), st.integers(1, 4))
def test_what_auto_returns_is_legal_and_fits(devices, gigabytes, samples, minibatches):
    work = replace(WORK, samples_per_step=samples, minibatches=min(minibatches, samples))
    capacities = dict.fromkeys(range(devices), gigabytes * GIB)
    try:
        plan = plan_auto(SPECS, capacities, work, "bfloat16")
    except ValueError:
        return
    check_plan(plan, SPECS, tuple(capacities), samples_per_step=samples,
               minibatch_samples=work.smallest_minibatch_samples)  # fmt: skip
    peaks = estimate_memory(plan, SPECS, work, "bfloat16")
    assert all(peak.total <= 0.9 * capacities[device] for device, peak in peaks.items())
    assert plan == plan_auto(SPECS, capacities, work, "bfloat16")


def _resolve(entries, capacity=100 * GIB, **kwargs):
    return resolve_plan(entries, SPECS, dict.fromkeys(range(4), capacity), WORK, "float32", **kwargs)


def test_a_plan_by_hand_gets_its_defaults():
    entries = NOTHING_SAID | {
        "actor.training": {"dp": 2, "tp": 2, "pp": None, "devices": [3, 2, 1, 0], "micro_batch": 5, "recompute": True},
        "critic.training": {"pp": 2},
    }
    plan = _resolve(entries)
    training = plan["actor.training"]
    assert training.devices == (3, 2, 1, 0) and training.layout == Layout(2, 1)
    assert training.micro_batch == 5 and training.recompute
    assert plan["critic.training"].devices == (0, 1) and not plan["critic.training"].recompute
    assert plan["critic.training"].micro_batch == 8  # half of a minibatch, so that the pipeline fills
    assert plan["actor.generation"].micro_batch == plan["reference.inference"].micro_batch == 32


def test_ppo_micro_batch_is_the_default_of_all_but_generation():
    plan = _resolve(NOTHING_SAID | {"critic.training": {"micro_batch": 2}}, micro_batch=6)
    assert [plan[name].micro_batch for name in SPECS] == [32, 6, 2, 6]


def test_a_plan_by_hand_is_never_given_recomputation_and_never_refused_for_memory_here():
    plan = _resolve(NOTHING_SAID, capacity=GIB)
    assert all(stage.micro_batch == 1 and not stage.recompute for _, stage in plan.items())


def test_an_illegal_plan_by_hand_is_refused_before_memory_is_looked_at():
    with pytest.raises(ValueError, match=r"plan\.actor\.generation: tp=4 is more than the model's 3 KV heads"):
        _resolve(NOTHING_SAID | {"actor.generation": {"tp": 4}})
    with pytest.raises(ValueError, match=r"leaves out `critic\.training`"):
        _resolve({name: {} for name in SPECS if name != "critic.training"})
    with pytest.raises(ValueError, match=r"dp=0"):
        _resolve(NOTHING_SAID | {"actor.generation": {"dp": 0}})
