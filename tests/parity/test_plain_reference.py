"""One device against the formulas: every layout is held against one device, and here one device against plain code."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from nereus.config import build_config
from nereus.runtime.engine import Engine
from nereus.runtime.generation import Response
from nereus.runtime.rollouts import Rollouts
from nereus.runtime.session import Session
from tests.parity.conftest import save_llama
from tests.parity.plain_ppo import PlainSample, PlainStep, load_llama, run_plain_step
from tests.parity.runs import read_whole, uniform_plan
from tests.runtime.steps import complete_step, prepare_step

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
EOS = 2
NUM_SAMPLES = 7
TOLERANCE = 1e-9
# No number is a default that a term could hide behind: clips bind, the gradient is clipped, rates warm up.
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "rollout": {
        "prompts_per_step": NUM_SAMPLES,
        "max_prompt_tokens": 16,
        "max_response_tokens": 10,
        "temperature": 0.7,
        "top_p": 0.9,
    },
    "ppo": {
        "epochs": 2,
        "minibatches": 2,
        "micro_batch": 3,
        "gamma": 0.97,
        "lam": 0.8,
        "clip": 0.1,
        "value_clip": 0.05,
        "kl_coef": 0.3,
        "no_eos_penalty": 0.4,
        "actor_lr": 3e-3,
        "critic_lr": 2e-3,
        "lr_warmup_updates": 3,
        "betas": [0.8, 0.95],
        "eps": 1e-5,
        "weight_decay": 0.1,
        "grad_clip": 0.5,
    },
    "precision": "float64",
    "steps": 1,
    "seed": 11,
    "cluster": {"devices": 4, "memory_per_device": "2GiB"},
}


def draw_rollouts(session: Session, seed: int) -> Rollouts:
    """Return responses of all lengths from 1 on, with and without EOS, with prepared scores."""
    rng = random.Random(seed)
    prompts = session.job.prompts[:NUM_SAMPLES]
    responses = []
    for i in range(NUM_SAMPLES):
        ended = i % 3 != 1
        tokens = [rng.randrange(3, 16) for _ in range(1 + i if ended else 10)]
        if ended:
            tokens[-1] = EOS
        responses.append(Response(i, tokens, [0.0] * len(tokens), ended))
    scores = torch.tensor([rng.random() for _ in responses], dtype=torch.float64)
    return Rollouts(list(range(NUM_SAMPLES)), prompts, responses, scores=scores)


@pytest.fixture(scope="module")
def steps(workers: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainStep, dict[str, Any]]:
    """The plain step, and what the session's leaves: columns, parameters and metrics."""
    folder = tmp_path_factory.mktemp("plain")
    actor_path, reference_path, critic_path = (
        save_llama(folder / name, seed) for seed, name in enumerate(("actor", "reference", "critic"))
    )
    tree = {
        **TREE,
        "model": {"path": str(actor_path)},
        "reference": {"path": str(reference_path)},
        "critic": {"path": str(critic_path)},
        "plan": uniform_plan(STAGES, 1, 1, 1),
        "run_dir": str(folder / "run"),
    }
    config = build_config(tree)
    with Session.open(config, run_id="plain", engine=workers) as session:
        rollouts = draw_rollouts(session, seed=4)
        head = torch.from_numpy(read_whole(session, workers, "critic.training")["value_head.weight"])
        prepare_step(session, 0, copy.deepcopy(rollouts))
        ours: dict[str, Any] = {"columns": session.rollouts.columns, "metrics": complete_step(session, 0)}
        for name in ("actor", "critic"):
            ours[name] = read_whole(session, workers, f"{name}.training")
    samples = [
        PlainSample(list(p.token_ids), r.tokens, float(score), r.ended)
        for p, r, score in zip(rollouts.prompts, rollouts.responses, rollouts.scores, strict=True)
    ]
    models = [load_llama(path) for path in (actor_path, reference_path, critic_path)]
    return run_plain_step(samples, *models, head, config), ours


def test_the_step_reaches_every_term(steps: tuple[PlainStep, dict[str, Any]]) -> None:
    """What never happens is not compared: clips bind in part, gradients exceed their clip, the critic is not blind."""
    plain, _ = steps
    assert 0.02 < plain.metrics["clip_fraction"] < 0.98
    assert max(plain.metrics["gradient_norm.actor"]) > TREE["ppo"]["grad_clip"]
    assert max(plain.metrics["gradient_norm.critic"]) > TREE["ppo"]["grad_clip"]
    assert plain.metrics["kl_k3"] > 0.01
    assert torch.cat(plain.columns["old_values"]).std() > 0.01


@pytest.mark.parametrize("column", ["old_logprobs", "ref_logprobs", "old_values", "advantages", "returns"])
def test_columns_follow_the_formulas(steps: tuple[PlainStep, dict[str, Any]], column: str) -> None:
    plain, ours = steps
    for expected, actual in zip(plain.columns[column], ours["columns"][column], strict=True):
        np.testing.assert_allclose(actual, expected.numpy(), rtol=0, atol=TOLERANCE)


def test_metrics_follow_the_formulas(steps: tuple[PlainStep, dict[str, Any]]) -> None:
    plain, ours = steps
    line = ours["metrics"]
    flat = {**line, **{f"gradient_norm.{role}": norms for role, norms in line["gradient_norm"].items()}}
    for name, expected in plain.metrics.items():
        assert flat[name] == pytest.approx(expected, rel=0, abs=TOLERANCE), name
    assert line["first_ratio_max_error"] <= TOLERANCE
    assert line["skipped_updates"] == 0


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_parameters_follow_the_formulas(steps: tuple[PlainStep, dict[str, Any]], role: str) -> None:
    plain, ours = steps
    expected = getattr(plain, role)
    assert expected.keys() == ours[role].keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(ours[role][name], tensor.numpy(), rtol=0, atol=TOLERANCE, err_msg=name)
