"""A whole session with real workers: what it leaves, and what happens when a worker dies or hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nereus.config import build_config
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from storage.records import read_records

TREE: dict[str, Any] = {
    "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 16, "max_response_tokens": 16},
    "steps": 2,
    "cluster": {"devices": 2, "memory_per_device": "1GiB"},
}


def run_one_step(session: Session, step: int) -> dict[str, Any]:
    session.generate(step)
    for method in (session.score, session.infer_reference, session.infer_logprobs, session.infer_values):
        method(step)
    session.estimate_advantages(step)
    session.train_actor(step)
    session.train_critic(step)
    session.sync_weights(step)
    return session.finish_step(step)


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=1 << 30, silent_after_s=2.0) as engine:
        engine.start([0, 1])
        yield engine


def open_session(folder: Path, engine: Engine | None = None, **tree: Any) -> Session:
    config = build_config({**TREE, **tree, "run_dir": str(folder / "run")})
    return Session.open(config, run_id="run", engine=engine)


def test_a_run_leaves_metrics_and_a_checkpoint_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with open_session(tmp_path) as session:
        pids = session.worker_pids()
        lines = [run_one_step(session, step) for step in session.steps]
        summary = session.finish()
    assert [line["step"] for line in lines] == [0, 1]
    assert [line["policy_version"] for line in lines] == [0, 2]
    assert len({line["sample_ids_digest"] for line in lines}) == 2
    assert [r["rollouts_digest"] for r in read_records(str(tmp_path / "run" / "metrics.jsonl"))] == [
        line["rollouts_digest"] for line in lines
    ]
    model = AutoModelForCausalLM.from_pretrained(summary["final"])
    assert sum(p.numel() for p in model.parameters()) > 1000
    assert AutoTokenizer.from_pretrained(summary["final"]).eos_token_id is not None
    assert pids and not any(is_alive(pid) for pid in pids.values())


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("sent", "reason"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "silent for 2 s")], ids=["killed", "stopped"]
)
@pytest.mark.parametrize("stage", ["generate", "train_actor"])
def test_a_lost_worker_is_one_clear_error(
    tmp_path: Path, engine: LocalEngine, sent: signal.Signals, reason: str, stage: str
) -> None:
    layout = {"dp": 1, "tp": 2, "pp": 1}
    stages = ("actor.generation", "actor.training", "critic.training", "reference.inference")
    with open_session(tmp_path, engine, plan=dict.fromkeys(stages, layout)) as session:
        run_one_step(session, 0)
        session.generate(1)
        for method in (session.score, session.infer_reference, session.infer_logprobs, session.infer_values):
            method(1)
        session.estimate_advantages(1)
        os.kill(engine.pids()[1], sent)
        started = time.monotonic()
        with pytest.raises(CommandError) as caught:
            getattr(session, stage)(1)
        assert time.monotonic() - started < 20
    name = "actor.generation" if stage == "generate" else "actor.training"
    for word in ("device 1", name, "step 1", reason):
        assert word in str(caught.value)


def test_generation_refuses_another_policy_version(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        run_one_step(session, 0)
        session.policy_version += 1
        with pytest.raises(CommandError, match=r"holds policy version 2, but 3 was asked for"):
            session.generate(1)


def test_training_and_reference_on_disjoint_devices_run_at_the_same_time(tmp_path: Path, engine: LocalEngine) -> None:
    """Two model-stages that share no device overlap; those that share one wait for each other."""
    stages = ("actor.generation", "actor.training", "critic.training", "reference.inference")
    plan = {name: {"devices": [0]} for name in stages} | {"critic.training": {"devices": [1]}}
    with open_session(tmp_path, engine, plan=plan) as session:
        session.generate(0)
        for method in (session.score, session.infer_reference, session.infer_logprobs, session.infer_values):
            method(0)
        session.estimate_advantages(0)
        spans: dict[str, tuple[float, float]] = {}
        barrier = threading.Barrier(2)

        def timed(name: str) -> None:
            barrier.wait(timeout=10)
            start = time.monotonic()
            getattr(session, name)(0)
            spans[name] = (start, time.monotonic())

        threads = [threading.Thread(target=timed, args=(name,)) for name in ("train_actor", "train_critic")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        session.sync_weights(0)
        session.finish_step(0)
    (a, b), (c, d) = spans["train_actor"], spans["train_critic"]
    assert max(a, c) < min(b, d)
