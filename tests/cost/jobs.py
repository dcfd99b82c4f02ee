"""Models, loads and plans that the tests of the cost model share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from nereus.cost.load import StepLoad
from nereus.cost.step import JobSpec
from nereus.layout import Layout
from nereus.model.spec import Head, ModelSpec
from nereus.plan import MODEL_STAGES, Plan, StagePlan, role_of
from nereus.presets import model_preset

HEADS: Mapping[str, Head] = {"actor": "lm", "reference": "lm", "critic": "value", "reward": "score"}


def small_spec(head: Head = "lm", **changes: int) -> ModelSpec:
    """Return a model whose sizes are easy to multiply by hand."""
    spec = ModelSpec("llama", vocab=1000, hidden=64, layers=8, heads=8, kv_heads=4, head_dim=8, intermediate=128)
    return replace(spec, head=head, **changes)  # type: ignore[arg-type]


def llama_specs(names: tuple[str, ...] = MODEL_STAGES) -> dict[str, ModelSpec]:
    return {name: model_preset("llama-3.1-8b", HEADS[role_of(name)]) for name in names}


def ppo_job(response_tokens: float = 1147.5, **changes: object) -> JobSpec:
    load = StepLoad(1024, 4, 512, response_tokens, 1.15 * response_tokens)
    return JobSpec(llama_specs(), load, **changes)  # type: ignore[arg-type]


def random_plan(rng: np.random.Generator, num_devices: int) -> Plan:
    """Return a plan with any powers of two, every model-stage on ids from 0."""
    stages = {}
    for name in MODEL_STAGES:
        tp = int(2 ** rng.integers(0, 4))
        pp = int(2 ** rng.integers(0, 4))
        size = min(tp * pp, num_devices)
        pp = max(1, size // tp)
        dp = num_devices // (tp * pp)
        devices = tuple(range(dp * tp * pp))
        stages[name] = StagePlan(dp, Layout(tp, pp), devices, int(2 ** rng.integers(0, 7)), bool(rng.random() < 0.5))
    return Plan.of(stages)
