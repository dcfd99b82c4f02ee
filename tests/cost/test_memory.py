"""Predicted memory: numbers by hand, what may never raise what, and the sentence for a plan that doesn't fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.cost.load import StepLoad
from nereus.cost.memory import (
    PlanMemory,
    Workload,
    check_memory,
    estimate_memory,
    fits,
    kv_slots,
    room_by_rank,
    spare_bytes,
)
from nereus.cost.rank_memory import FIXED_WORKSPACE_BYTES, estimate_rank, rank_parameters
from nereus.layout import Layout
from nereus.limits import REMOTE_STAGING_BUFFER_BYTES, STAGING_BUFFER_BYTES
from nereus.model.spec import ModelSpec, num_parameters
from nereus.plan import Plan, StagePlan
from nereus.ppo.batching import order_of_minibatches, pack_micro_batches

SMALL = ModelSpec("llama", vocab=100, hidden=8, layers=4, heads=4, kv_heads=2, head_dim=4, intermediate=16)
SMOLLM2 = ModelSpec("llama", 49_152, 576, 30, 9, 3, 64, 1_536, tie_embeddings=True)
WORK = Workload(samples_per_step=8, minibatches=2, prompt_tokens=6, response_tokens=10)
GIB = 2**30


def _rank(model_stage, spec=SMALL, *, tp=1, pp=1, rank=0, micro_batch=2, recompute=False, dp=1, precision="float32"):
    stage = StagePlan(dp, Layout(tp, pp), tuple(range(dp * tp * pp)), micro_batch, recompute)
    return estimate_rank(model_stage, stage, spec, rank, WORK, precision)


def _specs(spec: ModelSpec) -> dict[str, ModelSpec]:
    value = replace(spec, head="value")
    return {"actor.generation": spec, "actor.training": spec, "critic.training": value, "reference.inference": spec}


def _plan(spec: ModelSpec = SMALL, *, dp=1, micro_batch=2, **changes) -> Plan:
    stage = replace(StagePlan(dp, Layout(), tuple(range(dp)), micro_batch), **changes)
    return Plan.of(dict.fromkeys(_specs(spec), stage))


def test_small_model_by_hand():
    # Embedding and head 100 x 8 each; a layer has q and o of 16 x 8, k and v of 8 x 8, an MLP of 3 x 16 x 8, two norms.
    parameters = 2 * 800 + 8 + 4 * (2 * 128 + 2 * 64 + 3 * 128 + 2 * 8)
    assert num_parameters(SMALL) == parameters == rank_parameters(SMALL, Layout(), 0)
    training = _rank("actor.training")
    assert training.resident == {"parameters": 4 * parameters, "optimizer": 8 * parameters}
    assert training.phases["training"]["gradients"] == 4 * parameters
    generation = _rank("actor.generation").phases["generation"]
    assert generation["KV cache"] == 2 * 16 * 4 * (2 * 2 * 4) * 4  # slots, tokens, layers, K and V of a token, bytes
    assert generation["packed weights"] == 4 * (parameters - 800 - 8 - 4 * 16)  # all but the embedding and the norms


def test_activations_by_hand():
    phase = _rank("critic.training", replace(SMALL, head="value"), micro_batch=1).phases["training"]
    # A layer keeps 4 hidden, q + k + v, the attention output, 3 MLP widths, 2 scales and 4 log-sum-exps a token.
    layer = 4 * 8 + 32 + 16 + 3 * 16 + 2 + 4
    ends = 2 * 8 + 4  # the last output, its norm, and the rotary angles
    kept = 16 * (4 * (4 * layer + ends) + 64)
    backward = 16 * 4 * (3 * 16 + 8) + 16 * 4 * 16 * 4
    assert phase["activations"] == kept + backward


def test_smollm2_golden_numbers():
    assert num_parameters(SMOLLM2) == 134_515_008
    stage = _rank("actor.training", SMOLLM2)
    assert sum(stage.resident.values()) == 3 * 4 * 134_515_008
    # tp 2 holds 2 and 1 of 3 KV heads, and half of the rest; only norms are held twice.
    halves = [rank_parameters(SMOLLM2, Layout(2, 1), rank) for rank in (0, 1)]
    assert sum(halves) == 134_515_008 + (2 * 30 + 1) * 576
    # pp 2 holds the tied embedding twice.
    stages = [rank_parameters(SMOLLM2, Layout(1, 2), rank) for rank in (0, 1)]
    assert sum(stages) == 134_515_008 + 49_152 * 576


def test_bfloat16_keeps_float32_masters_beside_its_compute_copy():
    count = num_parameters(SMALL)
    training = _rank("actor.training", precision="bfloat16")
    assert training.resident == {"parameters": 4 * count, "optimizer": 8 * count, "compute copy": 2 * count}
    assert training.phases["training"]["gradients"] == 4 * count
    assert _rank("reference.inference", precision="bfloat16").resident == {"parameters": 2 * count}
    assert _rank("actor.training", precision="float64").resident["optimizer"] == 16 * count


def test_earlier_pipeline_stages_hold_more_micro_batches():
    stages = [_rank("critic.training", pp=4, rank=rank, micro_batch=1).phases["training"] for rank in range(4)]
    activations = [stage["activations"] for stage in stages[:3]]  # the last stage has a head as well
    assert activations == sorted(activations, reverse=True)
    assert activations[0] - activations[1] == activations[1] - activations[2] > 0
    # A minibatch of 4 samples is one micro-batch of 4: then no stage can hold more than that.
    whole = [_rank("critic.training", pp=4, rank=r, micro_batch=4).phases["training"]["activations"] for r in (0, 1)]
    assert whole[0] == whole[1]


def test_a_sliding_window_needs_a_mask_only_where_it_cuts():
    open_window, cut = (replace(SMALL, sliding_window=window) for window in (16, 15))
    for spec, more in ((open_window, 0), (cut, 16 * 16 * 15)):
        plain, windowed = (_rank("reference.inference", s).phases["inference"]["activations"] for s in (SMALL, spec))
        assert windowed - plain == more


splits = st.tuples(st.integers(1, 3), st.integers(1, 6))


@settings(max_examples=40, deadline=None)
@given(splits, st.sampled_from(["float32", "bfloat16", "float64"]), st.integers(1, 4), st.booleans())
def test_more_tp_never_raises_a_kind(split, precision, micro_batch, recompute):
    tp, pp = split
    kinds = []
    for degree in (tp, tp + 1):
        if degree > 3:
            return
        worst: dict[str, int] = {}
        for rank in range(degree * pp):
            memory = _rank("actor.training", SMOLLM2, tp=degree, pp=pp, rank=rank, micro_batch=micro_batch,
                           recompute=recompute, precision=precision)  # fmt: skip
            for phase in memory.phases.values():
                for kind in ("activations", "logits", "gradients"):
                    worst[kind] = max(worst.get(kind, 0), phase.get(kind, 0))
            for kind, count in memory.resident.items():
                worst[kind] = max(worst.get(kind, 0), count)
        kinds.append(worst)
    assert all(kinds[1][kind] <= kinds[0][kind] for kind in kinds[0])


@settings(max_examples=40, deadline=None)
@given(splits, st.integers(1, 4))
def test_recomputation_and_smaller_micro_batches_never_raise_activations(split, micro_batch):
    tp, pp = split
    for rank in range(tp * pp):

        def activations(rank=rank, **changes) -> int:
            return _rank("actor.training", SMOLLM2, tp=tp, pp=pp, rank=rank, **changes).phases["training"][
                "activations"
            ]

        plain = activations(micro_batch=micro_batch)
        assert activations(micro_batch=micro_batch, recompute=True) <= plain
        assert plain <= activations(micro_batch=micro_batch + 1)


@settings(deadline=None)
@given(st.integers(2, 29))
def test_more_pipeline_stages_never_raise_what_a_rank_holds_of_layers(pp):
    untied = replace(SMOLLM2, tie_embeddings=False)
    fewer, more = (max(rank_parameters(untied, Layout(1, p), r) for r in range(p)) for p in (pp, pp + 1))
    assert more <= fewer


def test_a_device_holds_the_residents_of_all_its_model_stages():
    peak = estimate_memory(_plan(), _specs(SMALL), WORK, "float32")[0]
    assert peak.phase == "training of actor.training"
    count, critic = num_parameters(SMALL), num_parameters(replace(SMALL, head="value"))
    assert peak.kinds["parameters"] == 4 * (3 * count + critic)
    assert peak.kinds["optimizer"] == 8 * (count + critic)
    assert peak.kinds["gradients"] == 4 * count
    assert peak.total == sum(peak.kinds.values()) > FIXED_WORKSPACE_BYTES


def test_weight_sync_costs_nothing_where_weights_stay_in_place():
    in_place = _plan(SMOLLM2, dp=2)
    assert "sync buckets" not in PlanMemory(in_place, _specs(SMOLLM2), WORK, "float32").phases(0)["weight sync"]
    away = in_place.with_stage("actor.training", devices=(2, 3)).with_stage("critic.training", devices=(4, 5))
    memory = PlanMemory(away, _specs(SMOLLM2), WORK, "float32")
    # Device 0 receives from two others, device 2 sends to two, with four buffers of 16 MiB for each.
    assert [memory.phases(d)["weight sync"].get("sync buckets", 0) for d in (0, 2, 4)] == [2**27, 2**27, 0]


def test_kv_slots_are_the_most_that_fit():
    specs, plan = _specs(SMOLLM2), _plan(SMOLLM2)
    work = replace(WORK, samples_per_step=4096, response_tokens=500)
    for capacity in (7 * GIB, 9 * GIB):
        slots = kv_slots(plan, specs, work, "float32", {0: capacity})
        room = room_by_rank("actor.generation", plan, specs, work, "float32", {0: capacity})[0]

        def need(count: int) -> int:
            stage = replace(plan["actor.generation"], micro_batch=count)
            return sum(
                estimate_rank("actor.generation", stage, SMOLLM2, 0, work, "float32").phases["generation"].values()
            )

        assert 0 < slots < 4096 and need(slots) <= room < need(slots + 1)
    assert kv_slots(plan, specs, work, "float32", {0: GIB}) == 0
    assert kv_slots(plan, specs, WORK, "float32", {0: 64 * GIB}) == WORK.samples_per_step


def test_a_plan_that_does_not_fit_is_refused_with_its_numbers():
    specs, plan = _specs(SMOLLM2), _plan(SMOLLM2)
    total = estimate_memory(plan, specs, WORK, "float32")[0].total
    enough = int(total / 0.9) + 1
    assert check_memory(plan, specs, WORK, "float32", {0: enough})[0].total == total
    assert fits(plan, specs, WORK, "float32", {0: enough})
    assert not fits(plan, specs, WORK, "float32", {0: enough - 2})
    with pytest.raises(ValueError) as caught:
        check_memory(plan, specs, WORK, "float32", {0: 2 * GIB})
    message = str(caught.value)
    assert message.startswith(
        f"plan needs {total / GIB:.2f} GiB on device 0 in training of actor.training (optimizer 2.00"
    )
    assert "90% of its 2.00 GiB are 1.80 GiB; use a smaller ppo.micro_batch, recompute, more tp or pp" in message
    assert message.count("\n") == 0


def test_the_worst_device_is_named():
    plan = _plan(dp=2)
    with pytest.raises(ValueError, match=r"on device 1 in .* but 90% of its 4\.00 MiB are 3\.60 MiB"):
        check_memory(plan, _specs(SMALL), WORK, "float32", {0: GIB, 1: 4 * 2**20})


def test_shares_of_uneven_work_round_up():
    work = Workload(samples_per_step=10, minibatches=4, prompt_tokens=1, response_tokens=1)
    assert (work.minibatch_samples, work.smallest_minibatch_samples) == (3, 2)
    assert work.share("actor.training", 2) == 2 and work.share("actor.generation", 3) == 4


def drawn_workload(lengths: np.ndarray, minibatches: int) -> Workload:
    mean, longest = float(lengths.mean()), float(lengths.max())
    p95 = max(mean, float(np.quantile(lengths, 0.95)))
    load = StepLoad(len(lengths), minibatches, 20, mean, p95, response_tokens_longest=longest)
    return load.memory_workload(longest, accelerator=False, drawn=True)


def test_one_long_response_fills_a_micro_batch():
    workload = drawn_workload(np.array([20] * 31 + [1000]), 2)
    assert workload.rows_of(1) == 1000
    assert 1060 <= workload.rows_of(4) <= 1200
    assert workload.rows_of(np.array([1, 4])).tolist() == [workload.rows_of(1), workload.rows_of(4)]


def test_what_prompts_are_above_their_mean_holds_for_all_drawn_samples():
    load = StepLoad(32, 2, 20, 50, 60, response_tokens_longest=70)
    with_margin, without = (load.memory_workload(length, accelerator=False, drawn=True) for length in (80, 70))
    assert with_margin.rows_of(8) == without.rows_of(8) + 8 * 10


def test_drawn_lengths_say_how_full_the_fullest_micro_batch_is():
    """Held against the batching that runs: random minibatches of a step, packed by length."""
    rng = np.random.default_rng(3)
    for samples, minibatches, most in [(32, 2, 16), (32, 2, 4), (64, 4, 8), (48, 4, 6)]:
        excess = []
        for step in range(40):
            lengths = np.clip(rng.normal(100, 40, samples), 1, 200).astype(int)
            workload = drawn_workload(lengths, minibatches)
            drawn = [[int(lengths[i]) for i in each] for each in order_of_minibatches(0, step, 0, samples, minibatches)]
            fullest = max(sum(each[i] for i in batch) for each in drawn for batch in pack_micro_batches(each, most))
            assert workload.rows_of(most) <= most * lengths.max() == most * workload.response_tokens
            assert workload.tokens_of(most) == most * workload.prompt_tokens + workload.rows_of(most)
            excess.append(workload.rows_of(most) / fullest - 1)
        assert -0.03 < np.mean(excess) < 0.12, (samples, minibatches, most, np.mean(excess))
        assert min(excess) > -0.15


def test_lengths_that_are_guesses_are_all_the_longest():
    workload = StepLoad(32, 2, 20, 50, 90, response_tokens_longest=100).memory_workload(110, accelerator=False)
    assert (workload.rows_of(4), workload.tokens_of(4)) == (440, 520)


def test_devices_that_train_hold_buffers_for_their_shards():
    plan = _plan(dp=2).with_stage("reference.inference", devices=(2, 3))
    remote = replace(WORK, staging_buffer_bytes=REMOTE_STAGING_BUFFER_BYTES)
    for work, buffer in ((WORK, STAGING_BUFFER_BYTES), (remote, REMOTE_STAGING_BUFFER_BYTES)):
        residents = PlanMemory(plan, _specs(SMALL), work, "float32").residents
        assert [residents[device]["staging buffers"] for device in (0, 1, 2, 3)] == [buffer, buffer, 0, 0]


def test_spare_bytes_are_free_in_every_phase():
    specs, plan = _specs(SMOLLM2), _plan(SMOLLM2, dp=2)
    peaks = estimate_memory(plan, specs, WORK, "float32")
    capacities = {0: 16 * GIB, 1: int(peaks[1].total / 0.9)}
    spare = spare_bytes(plan, specs, WORK, "float32", capacities)
    assert spare == {0: int(0.9 * 16 * GIB) - peaks[0].total, 1: 0}
