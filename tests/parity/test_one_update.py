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

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
TREE: dict[str, Any] = {
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
    losses: np.ndarray
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
        session.begin_step(copy.deepcopy(rollouts))
        session.infer_reference(0)
        session.infer_logprobs(0)
        session.infer_values(0)
        session.estimate_advantages(0)
        columns = session.rollouts.columns
        logprobs, ref_logprobs = (np.concatenate(columns[c]) for c in ("old_logprobs", "ref_logprobs"))
        session.train_actor(0)
        session.train_critic(0)
        session.sync_weights(0)
        metrics = session.finish_step(0)
    norms = metrics["gradient_norm"]
    return Update(
        rollouts,
        logprobs,
        ref_logprobs,
        np.array([metrics["policy_loss"], metrics["value_loss"]]),
        np.array([*norms["actor"], *norms["critic"]]),
    )


def relative(left: np.ndarray, right: np.ndarray) -> float:
    """Return the largest difference relative to the largest entry."""
    return float(np.abs(left - right).max() / np.abs(right).max())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_update_on_saved_rollouts(workers: Engine, tmp_path: Path, precision: str) -> None:
    base = run_update(workers, tmp_path, precision, (1, 1, 1), None)
    limit = TOLERANCE[precision]
    for layout in uniform_layouts():
        update = run_update(workers, tmp_path, precision, layout, base.rollouts)
        assert relative(update.logprobs, base.logprobs) <= limit, layout
        assert relative(update.ref_logprobs, base.ref_logprobs) <= limit, layout
        # The whitened policy loss of a first update is a sum that nearly cancels: it is compared on the scale of 1.
        assert np.abs(update.losses - base.losses).max() <= limit, layout
        assert relative(update.gradient_norms, base.gradient_norms) <= limit, layout
