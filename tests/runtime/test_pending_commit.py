"""A commit that is still being written when the plan changes: nothing that it writes from is freed before it ends."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nereus.runtime.elastic_steps
from nereus.cluster import Link
from nereus.config import build_config
from nereus.runtime.engine import run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from nereus.transition.speeds import Speeds
from tests.parity.runs import ODD_TINY
from tests.runtime.steps import run_step

DELAY_S = 1.0
DEVICES = range(2)


def plan(critic: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {"actor.generation": {}, "actor.training": {}, "critic.training": critic, "reference.inference": {}}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("tests.runtime.slow_rank:SlowRank", memory_per_device_bytes=2 << 30) as engine:
        engine.start(DEVICES)
        yield engine


def test_a_pending_commit_ends_before_what_it_writes_from_is_freed(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica goes that writes half of the critic's shards, and nothing of the move reads them."""
    link = Link(1e9, 0.0)
    speeds = Speeds(lambda device: 0, near=link, far=link, write=link, read=link, copy_bytes_s=1e9)
    monkeypatch.setattr(nereus.runtime.elastic_steps, "measure_speeds", lambda *a, **k: speeds)
    config = build_config(
        {
            "model": {"tiny": ODD_TINY},
            "rollout": {"prompts_per_step": 4, "max_prompt_tokens": 16, "max_response_tokens": 8},
            "steps": 2,
            "cluster": {"devices": 2, "memory_per_device": "2GiB"},
            "plan": [[0, plan({"dp": 2})], [1, plan({"dp": 1})]],
            "transport": "staged",
            "run_dir": os.fspath(tmp_path / "run"),
        }
    )
    with Session.open(config, run_id="pending", engine=engine) as session:
        staging = session._staging
        assert staging is not None
        run_step(session, 0)
        run_command(engine, "be", {device: {"delay_s": DELAY_S} for device in DEVICES}, label="slow", step=0)
        session.stage_state(0)
        assert session.transition_due(1)
        session.begin_transition(1)
        assert staging.pending_step == 0
        line = session.run_transition()
        assert [primitive["kind"] for primitive in line["primitives"]] == ["destroy"]
        assert line["outcome"] == "committed"
        assert staging.wait(60) and staging.newest is not None and staging.newest.step == 0
        run_step(session, 1)
