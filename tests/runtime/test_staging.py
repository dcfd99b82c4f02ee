"""Commits of a real run whose shards are slow or fail: what they hold, what they cost, and what they leave."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import nereus.runtime.staged_steps
from nereus.commits import live_commits, read_commit
from nereus.config import build_config
from nereus.inspection import inspect
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from nereus.runtime.staging import Staging
from storage.exclusive import create_exclusively
from storage.journal import Entry, FencedOff, Journal, _dump
from storage.manifest import Manifest, ShardRecord
from storage.records import read_records
from storage.state import read_state, verify_state
from tests.runtime.steps import run_step

STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
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
        let(engine, delay_s=0.4)  # a write lasts into the next step on slow machines too
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


def test_a_commit_that_the_next_driver_has_cleared_away_is_no_failure_of_a_store(
    tmp_path: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lose_run(*_: object) -> str:
        other = Journal(str(tmp_path / "run"))
        other.entries()
        other.append("take_over", {"owner": {}})
        raise FileNotFoundError("the set is gone")

    with open_session(tmp_path, engine) as session:
        take_step(session, 0)
        assert session._staging is not None and session._staging.wait(60)
        monkeypatch.setattr(session._staging, "_write_manifest", lose_run)
        session._staging.begin(1, session._run_state(1), session.plan.to_record())
        with pytest.raises(FencedOff):
            session._staging.wait(60)
    assert "was not staged" not in caplog.text


# Transitions: reading along with a commit, and sets of their own


class Reader:
    """Keeps what it is told of a commit, and by whom."""

    def __init__(self) -> None:
        self.records: list[ShardRecord] = []
        self.ends: list[Exception | None] = []
        self.is_done = threading.Event()

    def __call__(self, record: ShardRecord | None, error: Exception | None) -> None:
        if record is not None:
            assert not self.ends and error is None
            self.records.append(record)
            return
        self.ends.append(error)
        self.is_done.set()


def staging_of(session: Session) -> Staging:
    assert session._staging is not None
    return session._staging


def test_a_reader_is_given_all_shards_of_the_pending_commit_as_they_complete(
    tmp_path: Path, engine: LocalEngine
) -> None:
    with open_session(tmp_path, engine) as session:
        staging = staging_of(session)
        assert staging.pending_step is None
        let(engine, delay_s=0.1)
        take_step(session, 0)
        early, late, after = Reader(), Reader(), Reader()
        assert staging.pending_step == 0
        folder = staging.follow(early)
        while not early.records:
            assert not early.is_done.wait(0.01)
        assert not early.ends and staging.follow(late) == folder
        assert late.records == early.records[: len(late.records)] and late.records
        assert early.is_done.wait(60) and late.is_done.wait(60)
        assert staging.pending_step is None
        staging.follow(after)
    (manifest,) = commits_of(tmp_path).values()
    assert folder == str(tmp_path / "run" / "state" / "step-00000000-1")
    for reader in (early, late, after):
        assert reader.ends == [None] and reader.records == early.records
    assert sorted(early.records, key=lambda record: record.file) == sorted(
        manifest.shards, key=lambda shard: shard.file
    )


def test_a_reader_is_told_that_the_commit_failed(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        let(engine, delay_s=0.1, failures=1000)
        take_step(session, 0)
        readers = [Reader(), Reader()]
        staging_of(session).follow(readers[0])
        assert readers[0].is_done.wait(60)
        assert staging_of(session).pending_step is None
        staging_of(session).follow(readers[1])
        for reader in readers:
            assert "No space left on device" in str(reader.ends[0]) and len(reader.ends) == 1


def test_a_reader_that_fails_harms_neither_the_commit_nor_other_readers(tmp_path: Path, engine: LocalEngine) -> None:
    def fail(record: ShardRecord | None, error: Exception | None) -> None:
        raise KeyError("reader")

    with open_session(tmp_path, engine) as session:
        let(engine, delay_s=0.05)
        take_step(session, 0)
        other = Reader()
        staging_of(session).follow(fail)
        staging_of(session).follow(other)
        assert other.is_done.wait(60)
    assert list(commits_of(tmp_path)) == [0] and other.ends == [None]


def own_sets_of(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run" / "state").iterdir()} - sets_of(folder)


def write_sets(session: Session, step: int, first_epoch: int = 5) -> dict[str, str]:
    """Have both groups written at the same time; return their folders."""
    folders: dict[str, str] = {}
    staging = staging_of(session)

    def write(group: str, epoch: int) -> None:
        told: list[ShardRecord] = []
        records = staging.write_transition_set(step, epoch, group, told.append)
        folder = staging.transition_folder(step, epoch)
        assert read_state(folder).shards == records and {record.group for record in records} == {group}
        assert sorted(record.file for record in told) == sorted(record.file for record in records)
        folders[group] = folder

    groups = ("actor.training", "critic.training")
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(write, group, first_epoch + n) for n, group in enumerate(groups)]:
            future.result(60)
    return folders


def test_the_state_of_a_boundary_is_staged_for_a_transition_alone(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[int, Manifest]
) -> None:
    with open_session(tmp_path, engine, staging={"every": 4}) as session:
        let(engine, delay_s=0.02, failures=2)
        take_step(session, 0)
        folders = write_sets(session, 1)
        names = {"transition-00000001-1.5", "transition-00000001-1.6"}
        assert {Path(folder).name for folder in folders.values()} == names == own_sets_of(tmp_path)
        assert all(verify_state(folder) == [] for folder in folders.values())
        found = {key: value for folder in folders.values() for key, value in checksums_of(read_state(folder)).items()}
        assert found == checksums_of(undisturbed[0])
        assert staging_of(session).newest is None and not live_commits(Journal(str(tmp_path / "run")).entries())
        report = inspect(str(tmp_path / "run"))
        assert report.sets == () and report.uncommitted == ()
        for _ in range(2):
            staging_of(session).discard_transition_sets()
            assert not own_sets_of(tmp_path)
        let(engine)
        for step in (1, 2, 3):
            take_step(session, step)
    assert list(commits_of(tmp_path)) == [3]


def test_what_is_staged_for_a_transition_is_never_a_copy_of_an_earlier_step(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[int, Manifest]
) -> None:
    with open_session(tmp_path, engine, staging={"every": 3}) as session:
        for step in (0, 1):
            take_step(session, step)
        let(engine, delay_s=0.2, slow_in="step-")
        take_step(session, 2)
        run_step(session, 3)  # updates what the commit of step 2 has copied
        assert staging_of(session).pending_step == 2
        folders = write_sets(session, 4)
        found = {key: value for folder in folders.values() for key, value in checksums_of(read_state(folder)).items()}
    assert found == checksums_of(undisturbed[3])
    assert checksums_of(commits_of(tmp_path)[2]) == checksums_of(undisturbed[2])


def test_a_set_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine, staging={"every": 4}) as session:
        take_step(session, 0)
        let(engine, failures=1000)
        with pytest.raises(OSError, match="No space left on device"):
            staging_of(session).write_transition_set(1, 5, "actor.training", lambda record: None)
        staging_of(session).discard_transition_sets()
        assert not own_sets_of(tmp_path)
        let(engine)
        staging_of(session).write_transition_set(1, 6, "actor.training", lambda record: None)
        assert own_sets_of(tmp_path) == {"transition-00000001-1.6"}


def test_the_end_of_a_session_gives_up_what_is_staged_for_a_transition(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine, staging={"every": 4}) as session, ThreadPoolExecutor(1) as pool:
        take_step(session, 0)
        let(engine, delay_s=0.5)
        begun = threading.Event()
        written = pool.submit(
            staging_of(session).write_transition_set, 1, 5, "actor.training", lambda record: begun.set()
        )
        assert begun.wait(60)
        staging_of(session).close(timeout_s=0.1)
        with pytest.raises(OSError, match="there was no time left"):
            written.result(60)
        with pytest.raises(RuntimeError, match="being stopped"):
            staging_of(session).write_transition_set(1, 6, "actor.training", lambda record: None)
        engine.submit_beside(0, "be")
    assert own_sets_of(tmp_path) == {"transition-00000001-1.5"}
    with Session.open(build_config(TREE), run_id="other", engine=engine, resume_from=str(tmp_path / "run")):
        assert not own_sets_of(tmp_path), "those that a session has left go when the next one starts"


def test_after_a_change_of_the_plan_other_shards_are_written(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[int, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_session(tmp_path, engine, staging={"keep": 4}) as session:
        take_step(session, 0)
        staging_of(session).wait(60)
        monkeypatch.setattr(nereus.runtime.staged_steps, "SHARD_BYTES", 1 << 20)
        staging_of(session).adopt(session._hold_shards(), session._spare_bytes(session.plan))
        take_step(session, 1)
    commits = commits_of(tmp_path)
    assert len(commits[0].shards) > 4 * len(commits[1].shards) > 0
    assert {step: checksums_of(commits[step]) for step in (0, 1)} == {
        step: checksums_of(undisturbed[step]) for step in (0, 1)
    }


def test_a_run_that_went_back_commits_the_same_step_again(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path, engine) as session:
        staging, orders = staging_of(session), session._hold_shards()
        for version in (0, 1):
            state = {**session._run_state(0), "policy_version": version}
            staging.begin(0, state, session.plan.to_record())
            assert staging.wait(60)
            assert staging.newest is not None and staging.newest.step == 0
            staging.adopt(orders, {}, next_step=0)
            assert staging.commits == ()
    (manifest,) = commits_of(tmp_path).values()
    assert manifest.run_state["policy_version"] == 1
