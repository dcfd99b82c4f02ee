"""Updates that are not finite: skipped on all replicas and stages alike, counted, and in the end a stop."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nereus.config import build_config
from nereus.ppo.batching import order_of_minibatches
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from tests.parity.runs import assert_replicas_equal, read_whole, uniform_plan
from tests.runtime.steps import prepare_step

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
NUM_SAMPLES = 10
COLUMNS = {"actor": "advantages", "critic": "returns"}


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=1 << 30) as engine:
        engine.start(range(4))
        yield engine


def open_session(folder: Path, engine: Engine, minibatches: int) -> Session:
    """Return a session of two replicas of two pipeline stages: the last stages' numbers must reach all four ranks."""
    tree: dict[str, Any] = {
        "rollout": {"prompts_per_step": NUM_SAMPLES, "max_prompt_tokens": 16, "max_response_tokens": 8},
        "ppo": {"minibatches": minibatches, "actor_lr": 1e-3, "critic_lr": 1e-3},
        "cluster": {"devices": 4, "memory_per_device": "1GiB"},
        "plan": uniform_plan(STAGES, 2, 1, 2),
        "run_dir": str(folder / "run"),
    }
    return Session.open(build_config(tree), run_id="run", engine=engine)


def spoil(session: Session, column: str, minibatches: Collection[int]) -> None:
    """Put one infinity into one sample, so into one replica's share, of each of these minibatches of step 0."""
    ppo = session.config.ppo
    order = order_of_minibatches(session.config.seed, 0, 0, NUM_SAMPLES, ppo.minibatches)
    for index in minibatches:
        session.rollouts.columns[column][order[index][0]][-1] = math.inf


def train(session: Session, role: str) -> dict[str, Any]:
    return session.train_actor(0) if role == "actor" else session.train_critic(0)


@pytest.mark.parametrize("role", ["actor", pytest.param("critic", marks=pytest.mark.long)])
def test_an_update_that_is_not_finite_is_skipped_everywhere(tmp_path: Path, engine: Engine, role: str) -> None:
    """Two spoiled minibatches of two: nothing moves; then five, of which the third alone is sound: it is applied."""
    name = f"{role}.training"
    with open_session(tmp_path / "all", engine, minibatches=2) as session:
        prepare_step(session, 0)
        before = read_whole(session, engine, name)
        spoil(session, COLUMNS[role], [0, 1])
        record = train(session, role)
        assert (record["updates"], record["skipped"], session.policy_version) == (0, 2, 0)
        assert not any(math.isfinite(norm) for norm in record["gradient_norms"])
        for replica in range(2):
            after = read_whole(session, engine, name, replica)
            assert all(np.array_equal(before[tensor], after[tensor]) for tensor in before)

    with open_session(tmp_path / "most", engine, minibatches=5) as session:
        prepare_step(session, 0)
        spoil(session, COLUMNS[role], [0, 1, 3, 4])  # never three in a row
        records = {role: train(session, role) for role in ("actor", "critic")}
        assert (records[role]["updates"], records[role]["skipped"]) == (1, 4)
        assert session.policy_version == records["actor"]["updates"]
        after = read_whole(session, engine, name)
        assert all(np.isfinite(array).all() for array in after.values())
        assert any(not np.array_equal(before[tensor], after[tensor]) for tensor in before)
        assert_replicas_equal(session, engine, name)
        session.sync_weights(0)
        metrics = session.finish_step(0)
        assert metrics["skipped_updates"] == 4
        sums = ("policy_loss", "value_loss", "clip_fraction", "ratio_mean", "entropy")
        assert all(math.isfinite(metrics[key]) for key in sums), metrics


def test_three_in_a_row_stop_the_run_with_a_sentence(tmp_path: Path, engine: Engine) -> None:
    with open_session(tmp_path, engine, minibatches=5) as session:
        prepare_step(session, 0)
        spoil(session, "advantages", [2, 3, 4])
        with pytest.raises(CommandError) as caught:
            session.train_actor(0)
    message = str(caught.value)
    for words in ("actor.training, step 0", "not finite in 3 updates in a row", "lower the learning rate"):
        assert words in message
    assert "\n" not in message
    assert message.endswith(".")
