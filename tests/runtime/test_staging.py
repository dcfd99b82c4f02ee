"""Commits of a real run whose shards are slow or fail: what they hold, what they cost, and what they leave."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import nereus.runtime.staged_steps
from nereus.commits import live_commits, read_commit
from nereus.config import build_config
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from storage.exclusive import create_exclusively
from storage.journal import Entry, FencedOff, Journal, _dump
from storage.manifest import Manifest
from storage.records import read_records
from storage.state import verify_state
from tests.runtime.steps import run_step

STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")
TREE: dict[str, Any] = {
    "model": {"tiny": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 32}},
    "rollout": {"prompts_per_step": 4, "max_prompt_tokens": 16, "max_response_tokens": 8},
    "ppo": {"actor_lr": 1e-3, "critic_lr": 1e-3},
    "plan": {name: {"tp": 2} for name in STAGES},
    "steps": 4,
    "cluster": {"devices": 2, "memory_per_device": "1GiB"},
}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("tests.runtime.slow_rank:SlowRank", memory_per_device_bytes=1 << 30) as engine:
        engine.start([0, 1])
        yield engine


@pytest.fixture(autouse=True)
def _fast_again(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Many small shards, so that some wait while others are under way."""
    monkeypatch.setattr(nereus.runtime.staged_steps, "SHARD_BYTES", 20_000)
    yield
    let(engine)


def let(engine: Engine, **be: Any) -> None:
    """Make all workers slow or failing, or, without arguments, as others are."""
    run_command(engine, "be", {0: be, 1: be}, label="test", step=None)


def open_session(folder: Path, engine: Engine, **tree: Any) -> Session:
    config = build_config({**TREE, **tree, "run_dir": str(folder / "run")})
    return Session.open(config, run_id="run", engine=engine)


def take_step(session: Session, step: int) -> dict[str, Any]:
    metrics = run_step(session, step)
    session.stage_state(step)
    return metrics


def commits_of(folder: Path) -> dict[int, Manifest]:
    """Return the manifests of a run's commits that are still there, by step; all of them intact."""
    manifests = {}
    for commit in live_commits(Journal(str(folder / "run")).entries()):
        path = folder / "run" / "state" / commit.set_name
        if path.exists():
            assert verify_state(path) == []
            manifests[commit.step] = read_commit(str(folder / "run" / "state"), commit)
    return manifests


def checksums_of(manifest: Manifest) -> dict[tuple[str, str, tuple[int, ...]], str]:
    return {
        (shard.group, piece.part.name, piece.part.starts): piece.checksum
        for shard in manifest.shards
        for piece in shard.pieces
    }


@pytest.fixture(scope="module")
def undisturbed(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Manifest]:
    """The commits of a run that waits for each before it goes on."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with open_session(folder, engine, staging={"keep": 4}) as session:
        for step in session.steps:
            take_step(session, step)
            assert session._staging is not None and session._staging.wait(60)
    return commits_of(folder)


@pytest.mark.parametrize("room", ["room for copies", "no room"])
def test_a_commit_holds_the_end_of_its_step_whatever_the_next_one_does(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[int, Manifest], monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    if room == "no room":
        monkeypatch.setattr(nereus.runtime.staged_steps, "spare_bytes", lambda *_: {})
    with open_session(tmp_path, engine, staging={"keep": 4}) as session:
        let(engine, delay_s=0.1)
        metrics = [take_step(session, step) for step in session.steps]
    copied = run_command(engine, "count_written_from_copies", {0: {}, 1: {}}, label="test", step=None)
    assert all(count > 0 for count in copied.values()) == (room == "room for copies")
    commits = commits_of(tmp_path)
    assert list(commits) == [0, 1, 2, 3]
    for step, manifest in commits.items():
        assert manifest.run_state["counters"]["actor.training"]["updates"] == 2 * (step + 1)
        assert checksums_of(manifest) == checksums_of(undisturbed[step])
    assert metrics[0]["seconds"]["staging"] < metrics[1]["seconds"]["staging"]


def test_the_state_changes_with_every_step(undisturbed: dict[int, Manifest]) -> None:
    first, second = checksums_of(undisturbed[0]), checksums_of(undisturbed[1])
    differing = {name for key, checksum in first.items() if second[key] != checksum for name in [key[1]]}
    assert {name.partition("/")[0] for name in differing} > {"exp_avg", "exp_avg_sq"}
    assert len(differing) > 0.9 * len({name for _, name, _ in first})


def test_shards_that_fail_once_are_written_again(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        let(engine, failures=2)
        take_step(session, 0)
    assert list(commits_of(tmp_path)) == [0]


def test_a_commit_that_fails_is_warned_of_and_leaves_nothing_and_the_run_goes_on(
    tmp_path: Path, engine: LocalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with open_session(tmp_path, engine) as session, caplog.at_level(logging.WARNING):
        take_step(session, 0)
        assert session._staging is not None and session._staging.wait(60)
        let(engine, failures=1000)
        take_step(session, 1)
        take_step(session, 2)  # waits for the commit of step 1, then fails too
        assert session._staging.wait(60)
        assert session.newest_state is not None and session.newest_state["step"] == 0
        assert sets_of(tmp_path) == {"step-00000000-1"}
        let(engine)
        take_step(session, 3)
        summary = session.finish()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "No space left on device" in said[0]
    assert said[0].startswith("The state of step 1 was not staged (actor.training-")
    assert said[0].endswith("the run goes on, and a resume would begin after step 0.")
    assert list(commits_of(tmp_path)) == [0, 3]
    assert summary["staged_state"]["step"] == 3


def test_a_commit_whose_answer_was_lost_keeps_its_set_and_counts_from_the_next_one_on(
    tmp_path: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(tmp_path, engine) as session:
        assert session._staging is not None
        journal = session._opened.owner.journal

        def append_unheard(kind: str, body: Any) -> Any:
            number = len(journal._entries) + 1
            with suppress(FileExistsError):  # of the try before
                create_exclusively(
                    journal._path(number), _dump(Entry(number, kind, body, f"{journal._writer}.{number}"))
                )
            raise OSError("connection reset")

        take_step(session, 0)
        assert session._staging.wait(60)
        with monkeypatch.context() as patch:
            patch.setattr(journal, "append", append_unheard)
            take_step(session, 1)
            assert session._staging.wait(60)
        assert session.newest_state is not None and session.newest_state["step"] == 0
        assert sets_of(tmp_path) == {"step-00000000-1", "step-00000001-1"}
        assert list(commits_of(tmp_path)) == [0, 1], "the journal names it, so it must be there"
        take_step(session, 2)
        assert session._staging.wait(60)
        assert [commit.step for commit in session._staging._commits] == [0, 1, 2]
    assert list(commits_of(tmp_path)) == [1, 2]


def sets_of(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run" / "state").iterdir() if path.name.startswith("step-")}


def test_a_store_that_is_gone_ends_no_run(
    tmp_path: Path, engine: LocalEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with open_session(tmp_path, engine) as session:
        (tmp_path / "run" / "state").write_text("in the way")
        take_step(session, 0)
        assert session._staging is not None and session._staging.wait(60)
        assert session.newest_state is None
        os.unlink(tmp_path / "run" / "state")
        take_step(session, 1)
    assert "a resume would begin after the start." in caplog.text
    assert list(commits_of(tmp_path)) == [1]


def test_what_is_kept_and_how_often(tmp_path: Path, engine: LocalEngine) -> None:
    """Every second step and the last one, which is committed before the checkpoint is written."""
    with open_session(tmp_path, engine, steps=5, staging={"every": 2, "keep": 2}) as session:
        for step in session.steps:
            take_step(session, step)
        let(engine, delay_s=0.1)
        session.finish()
        assert list(commits_of(tmp_path)) == [3, 4]
    assert [commit.step for commit in live_commits(Journal(str(tmp_path / "run")).entries())] == [1, 3, 4]
    assert sets_of(tmp_path) == {"step-00000003-1", "step-00000004-1"}


def test_the_end_of_a_session_leaves_a_pending_commit_its_time(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        let(engine, delay_s=0.1)
        take_step(session, 0)
    assert list(commits_of(tmp_path)) == [0]


def test_what_takes_too_long_at_the_end_is_no_commit(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        let(engine, delay_s=0.3)
        take_step(session, 0)
        assert session._staging is not None
        session._staging.close(timeout_s=0.1)
        with pytest.raises(RuntimeError, match="being stopped"):
            session._before_update("actor.training")
    assert commits_of(tmp_path) == {}


def test_a_driver_that_lost_its_run_writes_nothing_more(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        take_step(session, 0)
        assert session._staging is not None and session._staging.wait(60)
        other = Journal(str(tmp_path / "run"))
        other.entries()
        other.append("take_over", {"owner": {}})
        with pytest.raises(FencedOff):
            run_step(session, 1)
        session._staging.begin(1, session._run_state(1), session.plan.to_record())
        with pytest.raises(FencedOff):
            session._staging.wait(60)
        with pytest.raises(FencedOff):
            session._before_update("actor.training")
    assert list(commits_of(tmp_path)) == [0]
    assert [record["step"] for record in read_records(str(tmp_path / "run" / "metrics.jsonl"))] == [0]
