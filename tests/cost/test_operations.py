"""Formulas of the operation classes against numbers computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE
from nereus.cost.load import StepLoad
from nereus.cost.operations import Operations, add_operations
from nereus.cost.options import Options
from nereus.cost.phases import generation_operations, inference_operations, training_phase_operations
from nereus.cost.rates import Rates
from nereus.layout import Layout
from nereus.plan import StagePlan
from tests.cost.jobs import small_spec

KIND = cluster_preset("a100-64gb-hdr").kind  # 4 devices a node
RATES = Rates(KIND, "bfloat16")
LOAD = StepLoad(32, 2, 100, 60, 60)
# A layer: q and o 64 x 64, k and v 64 x 32, gate, up and down 64 x 128.
LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128
# What passes between matrix products move for a token in a layer: norms, residuals, rotation, gate.
BETWEEN = 10 * 64 + 2 * (64 + 64) + 3 * 128


def work(ops: Operations, name: str) -> float:
    """Return the seconds of work of the only option."""
    return float(np.ravel(ops.work_s[name])[0])


def test_forward_pass_counts_products_attention_and_head():
    spec = small_spec()
    ops = inference_operations(spec, Options.of(KIND, 4, 1, 1, 2), LOAD, RATES).pick(0)
    tokens, rows = 8 * 160, 8 * 60
    flops = 2 * tokens * 8 * LAYER + 2 * rows * 64 * 1000
    num_bytes = 2 * (tokens * 8 * BETWEEN + 2 * rows * 1000)
    assert float(ops.work_s["gemm"]) == pytest.approx(flops / 312e12 + num_bytes / 1.64e12)
    assert float(ops.work_s["attention"]) == pytest.approx(8 * 8 * 4 * (160**2 / 2) * 64 / 312e12)
    assert float(ops.host) == 4  # 8 samples, 2 a micro-batch
    assert float(ops.work_s["all_reduce"]) == float(ops.count["p2p"]) == 0


def test_attention_grows_with_the_square_of_the_length():
    spec, options = small_spec("value"), Options.of(KIND, 1, 1, 1, 1)

    def seconds(response: int) -> float:
        return work(inference_operations(spec, options, StepLoad(8, 1, 1, response, response), RATES), "attention")

    assert seconds(3999) == pytest.approx(4 * seconds(1999))


def test_a_window_bounds_attention():
    load = StepLoad(8, 1, 200, 800, 800)
    assert load.causal_pairs() == 1000**2 / 2
    assert load.causal_pairs(100) == 1000 * 100 - 100**2 / 2


def test_tensor_parallel_all_reduce_inside_and_between_nodes():
    spec = small_spec()
    tokens = 32 * 160
    inside = inference_operations(spec, Options.of(KIND, 1, 4, 1, 32), LOAD, RATES).pick(0)
    # Two a layer, 3/4 of the tensor out and in at each rank.
    assert float(inside.work_s["all_reduce"]) == pytest.approx(2 * 8 * tokens * 64 * 2 * 1.5 / 300e9)
    assert float(inside.count["all_reduce"]) == 2 * 8 * 2
    # tp 3 on nodes of 4 devices: some group lies on two nodes, and two groups share a node's network.
    across = inference_operations(spec, Options.of(KIND, 4, 3, 1, 8), LOAD, RATES).pick(0)
    assert float(across.work_s["all_reduce"]) == pytest.approx(2 * 8 * (tokens / 4) * 64 * 2 * (4 / 3) * 2 / 50e9)


def test_uneven_heads_make_the_widest_rank_decide():
    spec = small_spec()
    even, uneven = (inference_operations(spec, Options.of(KIND, 1, tp, 1, 32), LOAD, RATES) for tp in (2, 3))
    # 4 KV heads on 3 ranks: 2 + 1 + 1, so no less attention than on 2 ranks.
    assert work(uneven, "attention") == work(even, "attention")


def _one_forward_one_backward(forward: list[float], backward: list[float], num_micro_batches: int) -> float:
    """Return the makespan of 1F1B by playing it: each stage's own order, each pass after what it depends on."""
    stages = len(forward)
    orders = []
    for stage in range(stages):
        ahead = min(num_micro_batches, stages - stage - 1)
        order = [("f", i) for i in range(ahead)]
        for i in range(num_micro_batches):
            order += [("f", i + ahead)] if i + ahead < num_micro_batches else []
            order += [("b", i)]
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[s] < len(orders[s]) for s in range(stages)):
        for s in range(stages):
            if at[s] == len(orders[s]):
                continue
            kind, i = orders[s][at[s]]
            need = (kind, i, s - 1) if kind == "f" else ("b", i, s + 1) if s + 1 < stages else ("f", i, s)
            if need[2] >= 0 and need not in done:
                continue
            seconds = forward[s] if kind == "f" else backward[s]
            free[s] = done[kind, i, s] = max(free[s], done.get(need, 0.0)) + seconds
            at[s] += 1
    return max(free)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 8), (4, 8), (4, 32)])
def test_the_bubble_is_that_of_a_played_pipeline(stages: int, micro_batches: int):
    spec = small_spec("value")
    load = StepLoad(micro_batches, 1, 100, 60, 60)
    ops = training_phase_operations(spec, Options.of(KIND, 1, 1, stages, 1), load, RATES).pick(0)
    alone = training_phase_operations(spec, Options.of(KIND, 1, 1, 1, 1), load, RATES).pick(0)
    pass_s = float(alone.work_s["attention"]) / micro_batches / stages
    played = _one_forward_one_backward([pass_s / 3.5] * stages, [pass_s * 2.5 / 3.5] * stages, micro_batches)
    assert float(ops.work_s["attention"]) == pytest.approx(played)


def test_the_stage_with_the_head_is_the_slowest():
    """2 layers a stage, the last with a head as large as 1.1 layers: m passes of it, and the others once."""
    spec = small_spec(vocab=int(1.1 * LAYER / 64))
    load = StepLoad(16, 1, 100, 60, 60)
    ops = inference_operations(spec, Options.of(KIND, 1, 1, 4, 1), load, RATES).pick(0)
    head_s = 2 * 60 * 64 * spec.vocab / 312e12 + 2 * 2 * 60 * spec.vocab / 1.64e12
    layer_s = 2 * 160 * LAYER / 312e12 + 2 * 160 * BETWEEN / 1.64e12
    assert float(ops.work_s["gemm"]) == pytest.approx(16 * (2 * layer_s + head_s) + 6 * layer_s)


def test_interleaving_divides_the_bubble_and_multiplies_messages():
    spec, load = small_spec("value"), StepLoad(16, 1, 100, 60, 60)
    plain, chunked = (
        training_phase_operations(spec, Options.of(KIND, 1, 1, 4, 1), load, RATES, interleave=v).pick(0) for v in (1, 2)
    )
    steady = work(training_phase_operations(spec, Options.of(KIND, 1, 1, 1, 1), load, RATES), "attention") / 4
    assert float(plain.work_s["attention"]) == pytest.approx(steady * (1 + 3 / 16))
    assert float(chunked.work_s["attention"]) == pytest.approx(steady * (1 + 3 / 32))
    assert work(chunked, "p2p") > 1.9 * work(plain, "p2p")


def test_training_is_three_forward_passes_and_recomputation_a_fourth():
    spec, load = small_spec("value"), StepLoad(16, 1, 100, 60, 60)
    forward = work(inference_operations(spec, Options.of(KIND, 1, 1, 1, 4), load, RATES), "gemm")
    plain, again = (
        work(training_phase_operations(spec, Options.of(KIND, 1, 1, 1, 4, r), load, RATES), "gemm")
        for r in (False, True)
    )
    assert again - plain == pytest.approx(forward, rel=1e-2)  # but for the value head
    elements = 8 * LAYER + 64
    accumulated = 4 * 2 * elements * 4 / 1.64e12
    updated = (elements + 1000 * 64) * (7 * 4 + 2) / 1.64e12
    assert plain == pytest.approx(3 * forward + accumulated + updated)


def test_logits_that_are_not_kept_are_computed_twice():
    spec = small_spec(vocab=200_000)
    few, many = (
        work(training_phase_operations(spec, Options.of(KIND, 1, 1, 1, b), LOAD, RATES), "gemm")
        for b in (4, 16)  # 240 and 960 rows of 400 kB: 256 MiB lie between
    )
    again = 2 * 2 * 16 * 60 * 64 * 200_000 / 312e12
    accumulated = 2 * (4 - 1) * 2 * (8 * LAYER + 64 * 200_000) * 4 / 1.64e12
    assert many - few == pytest.approx(again - accumulated)


def test_gradients_are_summed_in_float32_over_the_replicas():
    spec = small_spec()
    elements = 4 * LAYER / 2 + 500 * 64  # tp 2, pp 2: 4 layers cut in two, and half of the embedding
    # Four replicas of one node each: the rings of a node's 4 ranks share its network.
    ops = training_phase_operations(spec, Options.of(KIND, 4, 2, 2, 4), LOAD, RATES).pick(0)
    assert float(ops.work_s["dp_sync"]) == pytest.approx(2 * elements * 4 * 1.5 * 4 / 50e9)
    assert float(ops.count["dp_sync"]) == 2 * 2
    inside = training_phase_operations(spec, Options.of(KIND, 2, 2, 1, 4), LOAD, RATES).pick(0)
    assert float(inside.work_s["dp_sync"]) == pytest.approx(2 * (4 * LAYER + 1000 * 64) * 4 * 1.0 / 300e9)
    alone = training_phase_operations(spec, Options.of(KIND, 1, 2, 2, 4), LOAD, RATES).pick(0)
    assert float(alone.work_s["dp_sync"]) == float(alone.count["dp_sync"]) == 0


def test_decoding_reads_weights_every_step_and_each_samples_past_once():
    spec = small_spec()
    load = StepLoad(32, 2, 100, 60, 80)
    ops = generation_operations(spec, Options.of(KIND, 4, 1, 1, 8), load, RATES).pick(0)
    weights = 79 * (8 * LAYER + 1000 * 64) * 2
    variance = (20 / 1.645) ** 2
    past = 8 * (100 * 60 + (60**2 + variance) / 2) * 8 * 2 * 4 * 8 * 2
    draws = 8 * 60 * 1000 * (2 + 8)
    assert float(ops.work_s["decode"]) == pytest.approx((weights + past + draws) / 1.64e12)
    assert float(ops.host) == 79 + 1  # one prefill pass of 800 tokens draws the first token of each


def test_fewer_slots_take_more_steps():
    spec, load = small_spec(), StepLoad(32, 2, 100, 60, 80)
    all_at_once, half = (
        float(generation_operations(spec, Options.of(KIND, 4, 1, 1, slots), load, RATES).pick(0).host)
        for slots in (8, 4)
    )
    assert all_at_once == 79 + 1
    assert half == 8 * 59 / 4 + 20 + 2  # four slots are filled twice


CPU = replace(KIND, accelerator=False)
CPU_RATES = Rates(CPU, "bfloat16")


def test_on_a_cpu_a_pass_costs_what_its_layers_operations_cost():
    """The host is the device: it pays for each layer of a pass, and beside them for each command and update."""
    spec, load = small_spec(), StepLoad(32, 2, 100, 60, 80)
    gpu, cpu = (
        [
            generation_operations(spec, Options.of(kind, 4, 1, 1, 4), load, rates).pick(0),
            inference_operations(spec, Options.of(kind, 1, 1, 1, 4), load, rates).pick(0),
            training_phase_operations(spec, Options.of(kind, 1, 1, 1, 4, True), load, rates).pick(0),
        ]
        for kind, rates in ((KIND, RATES), (CPU, CPU_RATES))
    )
    assert [float(ops.host) for ops in gpu] == [8 * 59 / 4 + 20 + 2, 8, 8]
    assert [float(ops.host) for ops in cpu] == [1, 1, 2]
    assert float(gpu[0].count["decode"]) == 8 * (8 * 59 / 4 + 20)
    assert float(cpu[0].count["decode"]) == pytest.approx(float(gpu[0].count["decode"]) + 0.07 * 8 * 60)
    assert float(cpu[1].count["gemm"]) == 8 * 8 and float(cpu[2].count["gemm"]) == 4 * 8 * 8


def test_small_matrices_stay_in_a_cpus_cache():
    load = StepLoad(4, 1, 10, 50, 50)
    reading, cached = (
        work(generation_operations(small_spec(), Options.of(kind, 1, 1, 1, 1), load, rates), "decode")
        for kind, rates in ((KIND, RATES), (CPU, CPU_RATES))
    )
    weights = 4 * 49 * (8 * LAYER + 1000 * 64) * 2 / 1.64e12
    products = 4 * 50 * 2 * (8 * LAYER + 1000 * 64) / 312e12
    assert reading - cached == pytest.approx(weights - products)


def test_backward_passes_on_a_cpu_move_more_between_their_products():
    gpu, cpu = (
        work(training_phase_operations(small_spec(), Options.of(kind, 1, 1, 1, 4), LOAD, rates), "gemm")
        for kind, rates in ((KIND, RATES), (CPU, CPU_RATES))
    )
    assert cpu - gpu == pytest.approx(8 * 32 * 160 * BETWEEN * 2 / 1.64e12)


def test_waves_of_a_pipeline_read_the_weights_as_often_as_one_device():
    """pp stages with pp waves: each stage reads its share pp times a step. Keys and values are shared out."""
    spec, load = small_spec("value", layers=8), StepLoad(32, 2, 100, 60, 60)
    one = work(generation_operations(spec, Options.of(KIND, 1, 1, 1, 32), load, RATES), "decode")
    four = work(generation_operations(spec, Options.of(KIND, 1, 1, 4, 32), load, RATES), "decode")
    past = 32 * (100 * 60 + 60**2 / 2) * 8 * 2 * 4 * 8 * 2 / 1.64e12
    assert one - four == pytest.approx(0.75 * past, rel=0.01)


def test_large_batches_decode_at_the_speed_of_products():
    spec = small_spec("value")
    load = StepLoad(4096, 1, 1, 10, 10)
    ops = generation_operations(spec, Options.of(KIND, 1, 1, 1, 4096), load, RATES).pick(0)
    assert float(ops.work_s["decode"]) > 2 * 40960 * 8 * LAYER / 312e12


def test_many_options_at_once_equal_one_by_one():
    spec, rng = small_spec(), np.random.default_rng(3)
    columns = [rng.integers(1, 6, 50), rng.integers(1, 5, 50), rng.integers(1, 9, 50), rng.integers(1, 40, 50)]
    recompute = rng.random(50) < 0.5
    for estimate in (generation_operations, inference_operations, training_phase_operations):
        at_once = estimate(spec, Options.of(KIND, *columns, recompute), LOAD, RATES).total_s(CONSERVATIVE)
        for i in range(50):
            alone = estimate(spec, Options.of(KIND, *(c[i] for c in columns), recompute[i]), LOAD, RATES)
            assert float(alone.total_s(CONSERVATIVE)[0]) == pytest.approx(float(at_once[i]), rel=1e-12)


def test_options_of_a_plan_know_where_its_devices_are():
    cluster = cluster_preset("a100-64gb-hdr", 12)
    aligned = Options.of_stage(StagePlan(2, Layout(2, 2), tuple(range(8)), 1), cluster)
    shifted = Options.of_stage(StagePlan(2, Layout(2, 2), tuple(range(1, 9)), 1), cluster)
    assert not aligned.tp_across[0] and not aligned.pp_across[0] and aligned.nodes[0] == 2
    assert shifted.tp_across[0] and shifted.pp_across[0] and shifted.nodes[0] == 3
    derived = Options.of(cluster.kind, 2, 2, 2)
    assert (derived.tp_across[0], derived.pp_across[0], derived.nodes[0]) == (False, False, 2)


def test_time_is_latency_and_work_over_efficiency():
    ops = Operations({"all_reduce": np.float64(10)}, {"all_reduce": np.float64(2), "gemm": np.float64(3)}, 5)
    seconds = ops.seconds(CONSERVATIVE, slowdown=2.0)
    assert float(seconds["all_reduce"]) == pytest.approx(10 * 30e-6 + 2 / 0.4)
    assert float(seconds["gemm"]) == pytest.approx(2 * 3 / 0.45)
    assert float(seconds["host"]) == pytest.approx(2 * 5 * 4e-3)
    twice = add_operations(ops, ops)
    assert float(twice.total_s(CONSERVATIVE)) == pytest.approx(2 * float(ops.total_s(CONSERVATIVE)))
