"""Below float64 tokens may flip across layouts, so one update on saved rollouts is compared instead."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.config import build_config
from nereus.runtime.engine import Engine
from nereus.runtime.rollouts import Rollouts
from nereus.runtime.session import Session
from tests.parity.runs import ODD_TINY, uniform_layouts, uniform_plan
from tests.runtime.steps import complete_step, prepare_step

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "model": {"tiny": ODD_TINY},
    "rollout": {"prompts_per_step": 12, "max_prompt_tokens": 16, "max_response_tokens": 24},
    "ppo": {"minibatches": 1, "actor_lr": 1e-3, "critic_lr": 1e-3},
    "steps": 1,
    "seed": 3,
    "cluster": {"devices": 4, "memory_per_device": "2GiB"},
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}


@dataclass
class Update:
    """What one update of both models yields; arrays are over all response tokens in sample order."""

    rollouts: Rollouts
    logprobs: np.ndarray
    ref_logprobs: np.ndarray
    policy_loss: float
    value_loss: float
    mean_advantage_size: float
    gradient_norms: np.ndarray


def run_update(
    workers: Engine, folder: Path, precision: str, layout: tuple[int, int, int], rollouts: Rollouts | None
) -> Update:
    name = f"{precision}-{'x'.join(map(str, layout))}-{rollouts is None}"
    plan = uniform_plan(STAGES, *layout)
    config = build_config({**TREE, "precision": precision, "plan": plan, "run_dir": str(folder / name)})
    with Session.open(config, run_id=name, engine=workers) as session:
        if rollouts is None:
            session.generate(0)
            session.score(0)
            rollouts = copy.deepcopy(session.rollouts)
        prepare_step(session, 0, copy.deepcopy(rollouts))
        columns = session.rollouts.columns
        logprobs, ref_logprobs, advantages = (
            np.concatenate(columns[c]) for c in ("old_logprobs", "ref_logprobs", "advantages")
        )
        metrics = complete_step(session, 0)
    norms = metrics["gradient_norm"]
    return Update(
        rollouts,
        logprobs,
        ref_logprobs,
        metrics["policy_loss"],
        metrics["value_loss"],
        float(np.abs(advantages).mean()),
        np.array([*norms["actor"], *norms["critic"]]),
    )


def relative(left: np.ndarray, right: np.ndarray) -> float:
    """Return the largest relative difference of any entry; entries below 1 in size count as 1.

    That fits log-probs: an error of 1e-4 in one is a relative error of 1e-4 in the probability.
    """
    return float((np.abs(left - right) / np.maximum(np.abs(right), 1.0)).max())


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_one_update_on_saved_rollouts(workers: Engine, tmp_path: Path, precision: str) -> None:
    base = run_update(workers, tmp_path, precision, (1, 1, 1), None)
    limit = TOLERANCE[precision]
    for layout in uniform_layouts():
        update = run_update(workers, tmp_path, precision, layout, base.rollouts)
        assert relative(update.logprobs, base.logprobs) <= limit, layout
        assert relative(update.ref_logprobs, base.ref_logprobs) <= limit, layout
        assert abs(update.value_loss - base.value_loss) <= limit * abs(base.value_loss), layout
        # A first update's whitened policy loss is a sum that nearly cancels: its scale is that of its terms.
        assert abs(update.policy_loss - base.policy_loss) <= limit * base.mean_advantage_size, layout
        errors = np.abs(update.gradient_norms - base.gradient_norms) / base.gradient_norms
        assert errors.max() <= limit, (layout, errors)
