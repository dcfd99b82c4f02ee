"""The cost model against numbers that others published: step times of GRPO, and which layout trains best at 16 GPUs.

Nothing here was fitted: efficiencies are those of single kernels and links (see PUBLISHED), and sizes are the
published ones or follow from them.
"""

import itertools
import math
from statistics import NormalDist

import pytest

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE, PUBLISHED, Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.memory import USABLE_SHARE, estimate_memory
from nereus.cost.step import JobSpec, StepCost, estimate_step
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan
from tests.cost.jobs import llama_specs

# NeMo-RL's performance summary: Llama-3.1-8B on 16 H100, 64 prompts x 32 responses, train batch 512, 4,096 tokens at
# most. 1,562 tokens/s/GPU over 97.7 s are 1,192 tokens a sample: 132 of the prompt beside the mean response of 1,060.
ROWS = [pytest.param(1060, 97.7, id="v0.4"), pytest.param(1019, 92.8, id="v0.5")]
PROMPT, CAP, SAMPLES = 132, 4096, 2048


def log_normal_p95(mean: float, longest: float, samples: int) -> float:
    """Return the 95th percentile of a log-normal length with this mean whose largest of `samples` is `longest`."""
    z = NormalDist().inv_cdf(samples / (samples + 1))
    sigma = z - math.sqrt(z**2 - 2 * math.log(longest / mean))
    return mean * math.exp(1.645 * sigma - sigma**2 / 2)


def grpo_step(mean: float, efficiencies: Efficiencies = PUBLISHED) -> StepCost:
    """Return the step of the published recipe (grpo-llama3.1-8b-instruct-2n8g): packs of 4,096 tokens in training and
    8,192 in inference, activations recomputed, pp 2 with two chunks."""
    specs = llama_specs(("actor.generation", "actor.training", "reference.inference"))
    p95 = log_normal_p95(mean, CAP - PROMPT, SAMPLES)
    load = StepLoad(SAMPLES, 4, PROMPT, mean, p95, response_tokens_longest=CAP - PROMPT, algorithm="grpo")
    devices = tuple(range(16))
    plan = Plan.of(
        {
            "actor.generation": StagePlan(16, Layout(1, 1), devices, 256),
            "actor.training": StagePlan(8, Layout(1, 2), devices, 3, recompute=True),
            "reference.inference": StagePlan(8, Layout(1, 2), devices, 6),
        }
    )
    job = JobSpec(specs, load, "bfloat16", interleave=2, staging=False)
    return estimate_step(plan, job, cluster_preset("h100-dgx", 16), efficiencies)


@pytest.mark.parametrize(("mean", "published_s"), ROWS)
def test_grpo_steps_come_out_within_a_fifth(mean: float, published_s: float):
    """78.2 and 76.8 s, so 19.9% and 17.2% too fast: what lies between the stages of that system (engines put to sleep
    and woken, states moved to the host and back, data prepared) is no part of a step here. With the gemm figure of the
    fastest of all shapes, 0.80, it would be 29% and 27%."""
    assert grpo_step(mean).total_s == pytest.approx(published_s, rel=0.2)


def test_the_rows_differ_as_the_published_ones_do():
    assert grpo_step(1019).total_s < grpo_step(1060).total_s


def training_options(
    response_tokens: int, efficiencies: Efficiencies
) -> dict[tuple[int, int, int], tuple[float, bool]]:
    """Return by (dp, tp, pp) the seconds of 8B training on 16 A100 and whether it fits; micro-batch 2, all kept."""
    specs = llama_specs(("actor.training",))
    cluster = cluster_preset("a100-64gb-hdr", 16)
    load = StepLoad(1024, 4, 512, response_tokens, response_tokens)
    found = {}
    for tp, pp in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        if tp * pp > 16:
            continue
        dp = 16 // (tp * pp)
        plan = Plan.of({"actor.training": StagePlan(dp, Layout(tp, pp), tuple(range(16)), 2)})
        seconds = estimate_step(plan, JobSpec(specs, load), cluster, efficiencies).stages_s["training"]
        peaks = estimate_memory(plan, specs, load.memory_workload(), "bfloat16")
        fits = max(peak.total for peak in peaks.values()) <= USABLE_SHARE * cluster.kind.memory_bytes
        found[dp, tp, pp] = (seconds, fits)
    return found


@pytest.mark.parametrize("efficiencies", [CONSERVATIVE, PUBLISHED], ids=["conservative", "published"])
def test_the_best_layout_at_16_gpus_changes_with_the_length(efficiencies: Efficiencies):
    short, long = training_options(2048, efficiencies), training_options(4096, efficiencies)
    fitting = {key: seconds for key, (seconds, fits) in short.items() if fits}
    assert min(fitting, key=fitting.__getitem__) == (4, 2, 2)
    assert not long[4, 2, 2][1]
    assert short[4, 4, 1][1] and long[4, 4, 1][1]
    assert short[4, 4, 1][0] > short[4, 2, 2][0]
    fitting = {key: seconds for key, (seconds, fits) in long.items() if fits}
    assert min(fitting, key=fitting.__getitem__) == (4, 4, 1)
