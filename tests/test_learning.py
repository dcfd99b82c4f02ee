"""It learns: the tiny recipe, from random weights, on three seeds; and SmolLM2 takes real steps where it is at hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from nereus.config import load_config
from nereus.runtime.session import Session

SMOLLM2 = Path("models/smollm2-135m-instruct")


def run_recipe(name: str, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    config = load_config(name, [*overrides, f"run_dir={folder / name}"])
    lines = []
    with Session.open(config, run_id=name) as session:
        for step in session.steps:
            session.generate(step)
            for method in (session.score, session.infer_reference, session.infer_logprobs, session.infer_values):
                method(step)
            session.estimate_advantages(step)
            session.train_actor(step)
            session.train_critic(step)
            session.sync_weights(step)
            lines.append(session.finish_step(step))
    return lines


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_tiny_recipe_learns_and_its_responses_grow(tmp_path: Path, seed: int) -> None:
    lines = run_recipe("tiny-cpu", tmp_path, f"seed={seed}")

    def mean(part: list[dict[str, Any]], name: str) -> float:
        return sum(line[name] for line in part) / len(part)

    first, last = lines[:5], lines[-5:]
    assert mean(first, "reward_mean") >= 0.05
    assert mean(last, "reward_mean") >= 3 * mean(first, "reward_mean")
    assert mean(last, "response_tokens_mean") >= 1.5 * mean(first, "response_tokens_mean")
    assert max(line["first_ratio_max_error"] for line in lines) <= 1e-3
    assert sum(line["skipped_updates"] for line in lines) == 0
    # Memory must not creep: what a late step holds is what longer responses need, not what earlier ones left behind.
    assert max(lines[-1]["peak_memory_bytes"].values()) <= 256 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches the model")
def test_smollm2_takes_five_real_steps_within_16_gib(tmp_path: Path) -> None:
    lines = run_recipe("smollm2-135m", tmp_path)
    assert len(lines) == 5
    for line in lines:
        assert math.isfinite(line["reward_mean"]) and math.isfinite(line["kl_k1"])
        assert line["first_ratio_max_error"] <= 1e-3
        assert line["generation_logprob_gap_max"] <= 1e-3
        assert sum(line["peak_memory_bytes"].values()) <= 16 << 30
    assert lines[-1]["policy_version"] == 8
