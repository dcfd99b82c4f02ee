"""A run whose plan changes after every second step trains what a run on one plan trains, by whatever transport."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nereus.runtime.elastic_steps
from nereus.cluster import Link
from nereus.config import build_config
from nereus.runtime.engine import run_command
from nereus.runtime.job import prepare_job
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from nereus.staged_state import PREFIXES
from nereus.transition.speeds import Speeds
from storage.journal import Journal
from storage.records import read_records
from tests.parity.random_plans import random_schedule
from tests.parity.runs import ODD_TINY, uniform_plan
from tests.runtime.steps import complete_step, prepare_step

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
STEPS = 12
CHANGES = range(2, STEPS, 2)
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "model": {"tiny": ODD_TINY},
    "rollout": {"prompts_per_step": 9, "max_prompt_tokens": 16, "max_response_tokens": 8},
    "ppo": {"minibatches": 2, "actor_lr": 3e-3, "critic_lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1},
    "precision": "float64",
    "steps": STEPS,
    "seed": 5,
    "cluster": {"devices": 4, "memory_per_device": "2GiB"},
}
State = dict[str, np.ndarray]
_run_ids = itertools.count()


class Trained:
    """What a run leaves: drawn tokens, and whole parameters and moments by role."""

    def __init__(self) -> None:
        self.tokens: list[list[list[int]]] = []
        self.state: dict[str, State] = {}
        self.metrics: list[dict[str, Any]] = []
        self.pids: list[dict[int, int]] = []


def train(run_dir: str, **changes: Any) -> Trained:
    """Run a job that has workers of its own, and does what the flow does."""
    run_id = f"moving{next(_run_ids)}"
    config = build_config({**TREE, **changes, "run_dir": run_dir})
    result = Trained()
    with LocalEngine("tests.runtime.open_rank:OpenRank", memory_per_device_bytes=2 << 30) as engine:
        engine.start(prepare_job(config).plan.devices)
        with Session.open(config, run_id=run_id, engine=engine) as session:
            session._owns_engine = True  # workers come and go with the plan
            while (step := session.next_step) < config.steps:
                if session.transition_due(step):
                    session.begin_transition(step)
                    session.run_transition()
                    continue
                prepare_step(session, step)
                result.tokens.append([response.tokens for response in session.rollouts.responses])
                result.metrics.append(complete_step(session, step))
                session.stage_state(step)
                result.pids.append(session.worker_pids())
            for name in ("actor.training", "critic.training"):
                result.state[name] = read_whole_state(session, engine, name)
            session.finish()
    return result


def read_whole_state(session: Session, engine: LocalEngine, name: str) -> State:
    """Return all tensors of a training model-stage, which every replica must hold with the same bits."""
    wholes = []
    for devices in session.plan[name].replicas:
        whole: dict[str, dict[tuple[int, ...], np.ndarray]] = defaultdict(dict)
        for prefix in PREFIXES:
            kwargs = {device: {"model_stage": name, "prefixes": [prefix]} for device in devices}
            for part in run_command(engine, "read_state", kwargs, label=name, step=None).values():
                for starts, tensor, array in part:
                    whole[tensor][tuple(starts)] = array
        wholes.append({tensor: _assemble(pieces) for tensor, pieces in whole.items()})
    for other in wholes[1:]:
        assert all(np.array_equal(wholes[0][tensor], array) for tensor, array in other.items())
    return wholes[0]


def _assemble(pieces: Mapping[tuple[int, ...], np.ndarray]) -> np.ndarray:
    shape = tuple(
        max(start[dim] + array.shape[dim] for start, array in pieces.items()) for dim in range(len(next(iter(pieces))))
    )
    whole = np.full(shape, np.nan)
    for starts, array in pieces.items():
        whole[tuple(slice(s, s + n) for s, n in zip(starts, array.shape, strict=True))] = array
    return whole


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The run on one plan that all others are held against."""
    folder = tmp_path_factory.mktemp("fixed")
    return train(os.fspath(folder / "run"), plan=uniform_plan(STAGES, 1, 1, 1))


def assert_same(run: Trained, fixed: Trained) -> None:
    assert run.tokens == fixed.tokens
    for name, state in fixed.state.items():
        assert run.state[name].keys() == state.keys()
        for tensor, array in state.items():
            assert np.abs(run.state[name][tensor] - array).max() <= 1e-9, (name, tensor)
    assert max(m["first_ratio_max_error"] for m in run.metrics) <= 1e-9
    assert max(m["generation_logprob_gap_max"] for m in run.metrics) <= 1e-9


def assert_all_moved(run_dir: str, plan: list[list[Any]]) -> list[dict[str, Any]]:
    """Return the lines of transitions.jsonl: one for each change, all committed and verified."""
    changes = [step for (_, before), (step, after) in itertools.pairwise(plan) if before != after]
    lines = read_records(f"{run_dir}/transitions.jsonl")
    assert [line["step"] for line in lines] == changes
    assert {line["outcome"] for line in lines} == {"committed"} and all(line["verified"] for line in lines)
    entries = [entry.body for entry in Journal(run_dir).entries() if entry.kind == "transition"]
    assert [(body["step"], body["outcome"]) for body in entries] == [(step, "committed") for step in changes]
    return lines


@pytest.mark.parametrize("transport", ["direct", pytest.param("staged", marks=pytest.mark.long)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.slow)])
def test_changes_of_the_plan_change_nothing_else(tmp_path: Path, fixed: Trained, seed: int, transport: str) -> None:
    run_dir = os.fspath(tmp_path / "run")
    plan = random_schedule(seed, STAGES, [0, *CHANGES])
    run = train(run_dir, plan=plan, transport=transport)
    assert_same(run, fixed)
    lines = assert_all_moved(run_dir, plan)
    assert {p["transport"] for line in lines for p in line["primitives"]} == {transport, "none"}
    for (_, entry), pids in zip(plan, run.pids[1::2], strict=True):
        assert set(pids) == {device for stage in entry.values() for device in stage["devices"]}
    assert not [name for name in os.listdir(tmp_path / "run" / "state") if name.startswith("transition")]


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_cheaper_transport_of_each_transfer(
    tmp_path: Path, fixed: Trained, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Slow writing makes storage the better way only for what lies there already."""
    link, write, read = Link(1e6, 0.0), Link(1e5, 0.0), Link(2e6, 0.0)
    speeds = Speeds(lambda device: 0, near=link, far=link, write=write, read=read, copy_bytes_s=1e9)
    monkeypatch.setattr(nereus.runtime.elastic_steps, "measure_speeds", lambda *a, **k: speeds)
    run_dir = os.fspath(tmp_path / "run")
    plan = random_schedule(seed, STAGES, [0, *CHANGES])
    run = train(run_dir, plan=plan, transport="auto", staging={"every": 3})
    assert_same(run, fixed)
    used = {p["transport"] for line in assert_all_moved(run_dir, plan) for p in line["primitives"]}
    assert used >= {"direct", "staged"}


@pytest.mark.long
@pytest.mark.s3
def test_through_an_object_store(fixed: Trained, s3_url: str) -> None:
    run_dir = f"{s3_url}/run"
    plan = random_schedule(6, STAGES, [0, *CHANGES])
    run = train(run_dir, plan=plan, transport="staged", staging={"every": 2})
    assert_same(run, fixed)
    assert_all_moved(run_dir, plan)
