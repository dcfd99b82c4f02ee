"""Layout invariance: any plan trains the same model, up to the order of floating-point sums."""

from __future__ import annotations

import itertools
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.runtime.engine import Engine
from nereus.runtime.local import LocalEngine
from tests.parity.runs import ODD_TINY, Run, largest_difference, run_job, uniform_layouts, uniform_plan

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
# Learning rates at which parameters move by far more than the tolerance; eps keeps Adam from amplifying rounding.
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "model": {"tiny": ODD_TINY},
    "rollout": {"prompts_per_step": 9, "max_prompt_tokens": 16, "max_response_tokens": 12},
    "ppo": {"minibatches": 2, "actor_lr": 3e-3, "critic_lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1},
    "precision": "float64",
    "steps": 3,
    "seed": 5,
    "cluster": {"devices": 4, "memory_per_device": "2GiB"},
}
# What the reward model's runs do otherwise: several answers a prompt, cut tails, a second epoch, a moving KL weight.
MODEL_ROLLOUT = {"prompts_per_step": 3, "samples_per_prompt": 3, "top_p": 0.9}
MODEL_PPO = {"epochs": 2, "kl_adaptive": True, "kl_target": 0.1, "kl_horizon": 60, "no_eos_penalty": 0.3}
NUM_MIXED_PLANS = int(os.environ.get("NEREUS_SWEEP", "20"))


def tree_of(reward: str, reward_model: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the config and model-stages of a run whose reward is a function or a model."""
    if reward == "function":
        return TREE, STAGES
    rollout, ppo = TREE["rollout"] | MODEL_ROLLOUT, TREE["ppo"] | MODEL_PPO
    return {**TREE, "reward": {"model": str(reward_model)}, "rollout": rollout, "ppo": ppo}, [
        *STAGES,
        "reward.inference",
    ]


@pytest.fixture(scope="module")
def base(workers: Engine, tmp_path_factory: pytest.TempPathFactory, reward_model: Path) -> dict[str, Run]:
    """The runs on one device that all others are held against, by kind of reward."""
    folder = tmp_path_factory.mktemp("base")
    runs = {}
    for reward in ("function", "model"):
        tree, stages = tree_of(reward, reward_model)
        runs[reward] = run_job(workers, folder, tree, uniform_plan(stages, 1, 1, 1))
    return runs


def assert_same(run: Run, base: Run) -> None:
    assert run.tokens == base.tokens
    assert largest_difference(run, base) <= 1e-9
    assert [m["rollouts_digest"] for m in run.metrics] == [m["rollouts_digest"] for m in base.metrics]
    assert max(m["first_ratio_max_error"] for m in run.metrics) <= 1e-9
    assert max(m["generation_logprob_gap_max"] for m in run.metrics) <= 1e-9


def test_base_trains(base: dict[str, Run]) -> None:
    """The runs must do something: lengths differ, parameters move, the synced weights are the trained ones."""
    for reward, run in base.items():
        assert len({len(tokens) for step in run.tokens for tokens in step}) > 3
        assert run.metrics[-1]["policy_version"] == (4 if reward == "function" else 8)
        assert 0 < run.metrics[0]["share_at_cap"] < 1
        assert run.metrics[-1]["kl_k3"] > 1e-4
        assert run.metrics[-1]["reward_std"] > 0
        trained, synced = run.parameters["actor.training"], run.parameters["actor.generation"]
        assert all(np.array_equal(trained[name], synced[name]) for name in trained)


# The default suite takes one of each kind; the rest is long, and slow where a reward model tries it once more.
QUICK_LAYOUTS = ((1, 1, 3), (1, 3, 1), (2, 1, 2))
QUICK_MIXED_PLANS = 4


def long_unless(quick: bool, *values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=() if quick else pytest.mark.long)


def uniform_cases() -> list[Any]:
    cases = []
    for layout, reward in itertools.product(uniform_layouts(), ("function", "model")):
        marks = () if layout in QUICK_LAYOUTS else pytest.mark.long if reward == "function" else pytest.mark.slow
        cases.append(pytest.param(layout, reward, id=f"{'x'.join(map(str, layout))}-{reward}", marks=marks))
    return cases


@pytest.mark.parametrize(("layout", "reward"), uniform_cases())
def test_uniform_layouts(
    workers: Engine, tmp_path: Path, base: dict[str, Run], reward_model: Path, layout: tuple[int, int, int], reward: str
) -> None:
    tree, stages = tree_of(reward, reward_model)
    assert_same(run_job(workers, tmp_path, tree, uniform_plan(stages, *layout)), base[reward])


# Gradients that ranks share: tied embeddings over the first and last stage, q_norm and k_norm over tp, biases not.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3-tied": {"family": "qwen3", "tie_embeddings": True},
    "qwen2": {"family": "qwen2"},
}


@pytest.mark.parametrize("family", [long_unless(name == "qwen3-tied", name, id=name) for name in FAMILIES])
def test_families_whose_ranks_share_gradients(workers: Engine, tmp_path: Path, family: str) -> None:
    tree = {**TREE, "model": {"tiny": {**ODD_TINY, **FAMILIES[family]}}, "steps": 2}
    base = run_job(workers, tmp_path, tree, uniform_plan(STAGES, 1, 1, 1))
    for layout in ((1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 3, 1), (1, 1, 3), (2, 1, 2)):
        run = run_job(workers, tmp_path, tree, uniform_plan(STAGES, *layout))
        assert_same(run, base)
        norms = [[m["gradient_norm"][role] for m in r.metrics] for r in (run, base) for role in ("actor", "critic")]
        np.testing.assert_allclose(norms[:2], norms[2:], rtol=1e-9, err_msg=str(layout))


def draw_plan(stages: list[str], seed: int) -> dict[str, Any]:
    """Draw layout, devices in any order, micro-batch and recomputation of each model-stage on its own."""
    rng = random.Random(seed)
    plan = {}
    for name in stages:
        dp, tp, pp = rng.choice(uniform_layouts())
        plan[name] = {
            "dp": dp,
            "tp": tp,
            "pp": pp,
            "devices": rng.sample(range(4), dp * tp * pp),
            "micro_batch": rng.randint(1, 5),
            "recompute": name.endswith("training") and rng.random() < 0.5,
        }
    return plan


@pytest.mark.parametrize(
    "seed", [long_unless(seed < QUICK_MIXED_PLANS, seed, id=str(seed)) for seed in range(NUM_MIXED_PLANS)]
)
def test_mixed_plans(workers: Engine, tmp_path: Path, base: dict[str, Run], reward_model: Path, seed: int) -> None:
    reward = "model" if seed % 2 else "function"
    tree, stages = tree_of(reward, reward_model)
    assert_same(run_job(workers, tmp_path, tree, draw_plan(stages, seed)), base[reward])


@pytest.mark.parametrize(
    "precision", [long_unless(name == "float32", name, id=name) for name in ("float32", "bfloat16")]
)
@pytest.mark.parametrize(
    "layout",
    [long_unless(d == (1, 2, 2), d, id="x".join(map(str, d))) for d in [(1, 1, 1), (2, 1, 1), (1, 2, 2)]],
)
def test_same_plan_twice_is_bitwise_equal(
    workers: Engine, tmp_path: Path, layout: tuple[int, int, int], precision: str
) -> None:
    tree = {**TREE, "precision": precision}
    first, second = (run_job(workers, tmp_path, tree, uniform_plan(STAGES, *layout)) for _ in range(2))
    assert_bitwise_equal(first, second)


def assert_bitwise_equal(first: Run, second: Run) -> None:
    assert first.tokens == second.tokens
    assert largest_difference(first, second) == 0.0
    for left, right in zip(first.metrics, second.metrics, strict=True):
        volatile = {"seconds", "peak_memory_bytes"}
        assert {k: v for k, v in left.items() if k not in volatile} == {
            k: v for k, v in right.items() if k not in volatile
        }


@pytest.mark.long
@pytest.mark.parametrize(("devices", "threads"), [(2, 1), (1, 2)])
def test_fresh_workers_repeat_a_run_bit_by_bit(tmp_path: Path, devices: int, threads: int) -> None:
    """No process, allocator state or split of work over threads may show; matrices are large enough for two threads."""
    tree = {
        **TREE,
        "model": {"tiny": {"hidden": 192, "layers": 2, "heads": 6, "kv_heads": 3, "intermediate": 320, "vocab": 301}},
        "precision": "float32",
        "steps": 2,
        "cluster": {"devices": devices, "threads_per_device": threads, "memory_per_device": "2GiB"},
    }
    runs = []
    for _ in range(2):
        memory = 2 << 30
        with LocalEngine(
            "nereus.runtime.rank:Rank", threads_per_device=threads, memory_per_device_bytes=memory
        ) as engine:
            engine.start(range(devices))
            runs.append(run_job(engine, tmp_path, tree, uniform_plan(STAGES, devices, 1, 1)))
    assert_bitwise_equal(*runs)
