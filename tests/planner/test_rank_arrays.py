"""Memory on arrays is, rank for rank and option for option, what the memory model says."""

from dataclasses import replace

import numpy as np
import pytest

from nereus.cost.memory import Workload
from nereus.cost.rank_memory import estimate_rank
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan
from nereus.planner.rank_arrays import MemoryFormulas, rank_types, take_ranks

SMOLLM2 = ModelSpec("llama", 49_152, 576, 30, 9, 3, 64, 1_536, tie_embeddings=True)
WIDE_HEADS = ModelSpec("qwen3", 1000, 64, 5, 8, 4, 128, 96, qk_norm=True)
WINDOWED = ModelSpec("mistral", 32_000, 256, 6, 8, 2, 32, 700, sliding_window=100)
LAYOUTS = (Layout(), Layout(2, 1), Layout(1, 3), Layout(2, 2), Layout(2, 5))
STAGES = ("actor.generation", "actor.training", "reference.inference")


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("spec", [SMOLLM2, replace(SMOLLM2, head="value"), WIDE_HEADS, WINDOWED])
@pytest.mark.parametrize("mean", [None, 120])
def test_arrays_say_what_the_memory_model_says(spec: ModelSpec, precision, accelerator: bool, mean: int | None):
    work = Workload(64, 4, 100, 301, accelerator=accelerator, mean_response_tokens=mean, response_deviation=70)
    formulas = MemoryFormulas(work, precision)
    types = rank_types(spec, LAYOUTS)
    for name in STAGES:
        stage = name.split(".")[1]
        for index, layout in enumerate(LAYOUTS):
            ranks = take_ranks(types.ranks, types.of_rank[index])
            for dp, micro_batch, recompute in [(1, 1, False), (2, 5, True), (3, 64, False), (16, 2, True)]:
                share = np.int64(work.share(name, dp))
                resident = formulas.resident(stage, ranks)
                phase = formulas.phase(stage, ranks, share, np.int64(micro_batch), recompute, np.int64(dp))
                for rank in range(layout.size):
                    planned = StagePlan(dp, layout, (), micro_batch, recompute)
                    true = estimate_rank(name, planned, spec, rank, work, precision)
                    assert resident[rank] == sum(true.resident.values())
                    assert phase[rank] == max(sum(kinds.values()) for kinds in true.phases.values())


def test_options_and_ranks_broadcast():
    types = rank_types(SMOLLM2, LAYOUTS)
    formulas = MemoryFormulas(Workload(64, 4, 100, 301), "bfloat16")
    ranks = take_ranks(types.ranks, types.first[:, None])
    phase = formulas.phase(
        "training", ranks, np.full(1, 16), np.array([1, 2, 4, 8]), np.array([False, True, True, True])
    )
    assert phase.shape == (5, 4) and (np.diff(phase[:, 1:]) > 0).all()
