"""The fast memory of many options is the plain one of each: equal to its worst rank, byte for byte."""

import numpy as np
import pytest

from nereus.cost.load import StepLoad
from nereus.cost.memory import Workload, estimate_memory
from nereus.cost.option_memory import estimate_option_memory
from nereus.cost.rank_memory import estimate_rank
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import MODEL_STAGES, Plan, StagePlan, role_of, stage_of
from nereus.presets import model_preset

HEADS = {"actor": "lm", "reference": "lm", "critic": "value", "reward": "score"}


def worst_rank(name: str, stage: StagePlan, spec: ModelSpec, workload: Workload, precision: str) -> tuple[int, int]:
    needs = [estimate_rank(name, stage, spec, rank, workload, precision) for rank in range(stage.layout.size)]
    buffers = workload.staging_buffer_bytes if stage_of(name) == "training" else 0
    held = [sum(need.resident.values()) + buffers for need in needs]
    most = [max(sum(kinds.values()) for kinds in need.phases.values()) for need in needs]
    return max(held), max(a + b for a, b in zip(held, most, strict=True))


@pytest.mark.parametrize("preset", ["qwen3-14b", "smollm2-135m"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", MODEL_STAGES)
def test_equals_the_worst_rank(preset: str, precision: str, name: str):
    spec = model_preset(preset, HEADS[role_of(name)])
    rng = np.random.default_rng(7)
    for accelerator in (False, True):
        workload = StepLoad(96, 4, 200, 700.5, 900).memory_workload(1500, accelerator=accelerator)
        dp, tp, pp = rng.integers(1, 25, 12), rng.integers(1, spec.kv_heads + 1, 12), rng.choice([1, 2, 3, 7], 12)
        micro_batch, recompute = rng.integers(1, 40, 12), rng.random(12) < 0.5
        got = estimate_option_memory(name, spec, workload, precision, dp, tp, pp, micro_batch, recompute)
        for i in range(len(dp)):
            layout = Layout(int(tp[i]), int(pp[i]))
            stage = StagePlan(int(dp[i]), layout, (), int(micro_batch[i]), bool(recompute[i]))
            held, peak = worst_rank(name, stage, spec, workload, precision)
            assert (got.resident[i], got.peak[i]) == (held, peak), (layout, stage)


def test_a_sliding_window_counts():
    spec = ModelSpec(
        "mistral", vocab=320, hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=96, sliding_window=64
    )
    workload = Workload(16, 2, 64, 200)
    got = estimate_option_memory("actor.training", spec, workload, "float32", 2, [1, 2], 2, 3)
    for i, tp in enumerate((1, 2)):
        stage = StagePlan(2, Layout(tp, 2), (), 3)
        assert got.peak[i] == worst_rank("actor.training", stage, spec, workload, "float32")[1]


def test_a_device_needs_no_more_than_the_sum_of_its_options():
    """Peak of one model-stage and residents of the others: never below what the whole plan's memory says."""
    spec = model_preset("llama-3.1-8b")
    specs = {name: model_preset("llama-3.1-8b", HEADS[role_of(name)]) for name in MODEL_STAGES}
    workload = StepLoad(64, 4, 512, 2000, 2300).memory_workload()
    plan = Plan.of(
        {
            "actor.generation": StagePlan(4, Layout(2, 1), tuple(range(8)), 16),
            "actor.training": StagePlan(2, Layout(2, 2), tuple(range(8)), 2),
            "critic.training": StagePlan(1, Layout(4, 2), tuple(range(8)), 2, recompute=True),
            "reference.inference": StagePlan(2, Layout(1, 2), tuple(range(4)), 4),
            "reward.inference": StagePlan(2, Layout(1, 2), tuple(range(4, 8)), 4),
        }
    )
    peaks = estimate_memory(plan, specs, workload, "bfloat16")
    memory = {}
    for name, stage in plan.items():
        numbers = (stage.dp, stage.layout.tp, stage.layout.pp, stage.micro_batch, stage.recompute)
        memory[name] = estimate_option_memory(name, specs[name], workload, "bfloat16", *numbers)
    for device, peak in peaks.items():
        here = [name for name, stage in plan.items() if device in stage.devices]
        residents = sum(int(memory[name].resident[0]) for name in here)
        bound = max(residents - int(memory[name].resident[0]) + int(memory[name].peak[0]) for name in here)
        assert peak.total <= bound, (device, peak)
    assert spec == specs["actor.training"]
