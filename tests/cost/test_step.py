"""The latency of a whole step: which model-stages wait for each other, and what is hidden behind what."""

import json

import pytest

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE, Efficiencies
from nereus.cost.options import Options
from nereus.cost.step import JobSpec, estimate_stage, estimate_step, makespan, phases_of, step_operations
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, Plan, StagePlan
from tests.cost.jobs import llama_specs, ppo_job

CLUSTER = cluster_preset("a100-64gb-hdr", 32)
HALVES = (tuple(range(16)), tuple(range(16, 32)))


def split_plan(**devices: tuple[int, ...]) -> Plan:
    """Return a plan of 16 devices a model-stage; `devices` by role, the first half unless given."""
    stages = {}
    for name in MODEL_STAGES:
        layout = Layout(2, 2) if name.endswith("training") else Layout(2, 1)
        ids = devices.get(name.split(".")[0], HALVES[0])
        stages[name] = StagePlan(16 // layout.size, layout, ids, 4 if layout.pp > 1 else 32)
    return Plan.of(stages)


def test_tasks_wait_only_for_those_they_share_a_device_with():
    assert makespan([(0, 1), (2, 3), (1, 2)], [2.0, 3.0, 1.0]) == 4.0
    assert makespan([(0,), (1,), (2,)], [2.0, 3.0, 1.0]) == 3.0
    assert makespan([(0,), (0,), (0,)], [2.0, 3.0, 1.0]) == 6.0
    assert makespan([], []) == 0.0


def test_stages_follow_each_other_and_model_stages_share_or_split_devices():
    job = ppo_job()
    together = estimate_step(split_plan(), job, CLUSTER, CONSERVATIVE)
    apart = estimate_step(split_plan(critic=HALVES[1]), job, CLUSTER, CONSERVATIVE)
    of = together.model_stages_s
    assert together.total_s == pytest.approx(sum(together.stages_s.values()))
    assert together.stages_s["generation"] == of["actor.generation/generation"]
    assert together.stages_s["training"] == pytest.approx(
        of["actor.training/training"] + of["critic.training/training"]
    )
    assert apart.stages_s["training"] == max(of["actor.training/training"], of["critic.training/training"])
    # Old log-probs and values are computed in the inference stage, beside the frozen models.
    names = ("actor.training", "critic.training", "reference.inference", "reward.inference")
    assert together.stages_s["inference"] == pytest.approx(sum(of[f"{name}/inference"] for name in names))
    assert phases_of("critic.training") == ("inference", "training")


def test_a_plan_costs_what_its_options_do():
    job, plan = ppo_job(), split_plan()
    step = estimate_step(plan, job, CLUSTER, CONSERVATIVE)
    for name, stage in plan.items():
        options = Options.of(CLUSTER.kind, stage.dp, stage.layout.tp, stage.layout.pp, stage.micro_batch)
        cost = estimate_stage(name, options, job, CLUSTER.kind, CONSERVATIVE)
        for phase, seconds in cost.seconds.items():
            assert step.model_stages_s[f"{name}/{phase}"] == pytest.approx(float(seconds[0]), rel=1e-12)


def test_without_critic_and_reward_model_they_cost_nothing():
    names = ("actor.generation", "actor.training", "reference.inference")
    job = JobSpec(llama_specs(names), ppo_job().load)
    plan = Plan.of({name: split_plan()[name] for name in names})
    step = estimate_step(plan, job, CLUSTER, CONSERVATIVE)
    assert not job.has_critic
    assert step.stages_s["training"] == step.model_stages_s["actor.training/training"]
    assert "critic.training/training" not in step.model_stages_s


def test_weights_stay_where_generation_lies_on_training():
    job = ppo_job()
    plan = split_plan()
    training = plan["actor.training"]
    in_place = plan.with_stage("actor.generation", dp=training.dp, layout=training.layout, devices=training.devices)
    assert estimate_step(in_place, job, CLUSTER, CONSERVATIVE).stages_s["weight_sync"] == 0.0
    # tp 2 receives half of 16 GB from the node itself, where training has a whole copy on every node.
    near = step_operations(plan, job, CLUSTER)["weight_sync"]
    assert float(near.work_s["weight_sync"]) == pytest.approx(8.03e9 * 2 / 2 / 300e9, rel=0.01)
    # On other nodes each node receives two copies through its network.
    far = step_operations(split_plan(actor=HALVES[0]).with_stage("actor.generation", devices=HALVES[1]), job, CLUSTER)
    assert float(far["weight_sync"].work_s["weight_sync"]) == pytest.approx(2 * 16.06e9 / 50e9, rel=0.01)


def test_staging_is_hidden_behind_generation_and_inference():
    job, plan = ppo_job(), split_plan()
    step = estimate_step(plan, job, CLUSTER, CONSERVATIVE)
    written = float(step_operations(plan, job, CLUSTER)["staging"].work_s["storage_write"])
    # Actor and critic: 12 bytes a parameter, written by the four nodes that train.
    assert written == pytest.approx((8.03e9 + 7.505e9) * 12 / 4 / 2.5e9, rel=0.01)
    assert step.stages_s["staging"] == 0.0
    slow = estimate_step(plan, job, CLUSTER, CONSERVATIVE.with_changes(storage_write=0.05))
    hidden = slow.stages_s["generation"] + slow.stages_s["inference"]
    assert slow.stages_s["staging"] == pytest.approx(slow.model_stages_s["staging"] - hidden)
    assert "staging" not in step_operations(plan, ppo_job(staging=False), CLUSTER)


def test_a_slow_device_slows_what_runs_on_it():
    job = ppo_job()
    slow = Efficiencies(CONSERVATIVE.efficiency, CONSERVATIVE.latency_s, CONSERVATIVE.host_s, {20: 1.5})
    spared = estimate_step(split_plan(), job, CLUSTER, slow)
    hit = estimate_step(split_plan(critic=HALVES[1]), job, CLUSTER, slow)
    base = estimate_step(split_plan(critic=HALVES[1]), job, CLUSTER, CONSERVATIVE)
    assert spared == estimate_step(split_plan(), job, CLUSTER, CONSERVATIVE)
    classes, usual = hit.classes_s["critic.training/training"], base.classes_s["critic.training/training"]
    assert classes["gemm"] == pytest.approx(1.5 * usual["gemm"])
    assert classes["dp_sync"] == usual["dp_sync"]
    assert hit.classes_s["actor.training/training"] == base.classes_s["actor.training/training"]


def test_longer_responses_and_lower_efficiency_take_longer():
    plan = split_plan()
    seconds = [estimate_step(plan, ppo_job(n), CLUSTER, CONSERVATIVE).total_s for n in (500, 1000, 4000)]
    assert seconds == sorted(seconds)
    for name in ("gemm", "attention", "decode", "all_reduce", "dp_sync", "p2p"):
        half = CONSERVATIVE.with_changes(**{name: CONSERVATIVE.efficiency[name] / 2})
        assert estimate_step(plan, ppo_job(), CLUSTER, half).total_s > seconds[0], name


def test_records_are_plain_json():
    step = estimate_step(split_plan(), ppo_job(), CLUSTER, CONSERVATIVE)
    assert json.loads(json.dumps(step.to_record()))["total_s"] == step.total_s
    again = Efficiencies.from_record(json.loads(json.dumps(CONSERVATIVE.to_record())))
    assert again.to_record() == CONSERVATIVE.to_record()


def test_wrong_efficiencies_are_named():
    with pytest.raises(ValueError, match="'gem', which is no class"):
        CONSERVATIVE.with_changes(gem=0.5)
    with pytest.raises(ValueError, match="efficiency of gemm is 0"):
        CONSERVATIVE.with_changes(gemm=0.0)
    with pytest.raises(ValueError, match="leaves out 'gemm'"):
        Efficiencies({}, CONSERVATIVE.latency_s, 0.0)
