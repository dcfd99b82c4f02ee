"""A run under control trains what a run on one plan trains, whatever befalls its devices and its memory."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import nereus.runtime.elastic_steps
import nereus.runtime.staged_steps
from nereus.config import build_config
from nereus.control import tell_drain
from nereus.runtime.deaths import Deaths
from nereus.runtime.elastic_steps import MOST_ATTEMPTS
from nereus.runtime.engine import CommandError, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from nereus.transition.graph import InfeasibleTransition
from storage.journal import Journal
from storage.records import read_records
from tests.parity.runs import uniform_plan
from tests.parity.test_transitions import STAGES, Trained, assert_same, read_whole_state
from tests.parity.test_transitions import TREE as FIXED_TREE
from tests.runtime.steps import drive

STEPS = 8
TREE: dict[str, Any] = {
    **FIXED_TREE,
    "steps": STEPS,
    "cluster": {"devices": 2, "memory_per_device": "2GiB"},
    "adapt": {"enabled": True},
}
_run_ids = itertools.count()
# Strikes a session at a point of a step: (session, step, method about to be called).
Strike = Callable[[Session, int, str], None]
METHODS = ("generate", "score", "infer_reference", "infer_logprobs", "infer_values", "estimate_advantages",
           "train_actor", "train_critic", "sync_weights", "finish_step", "stage_state")  # fmt: skip


class StruckSession(Session):
    """A session that is struck right before the methods of its steps."""

    strike: Strike = staticmethod(lambda *_: None)

    def finish(self) -> dict[str, Any]:
        self.strike(self, self.next_step, "finish")
        return super().finish()


def _struck(name: str) -> Callable[..., Any]:
    def method(self: StruckSession, step: int) -> Any:
        self.strike(self, step, name)
        return getattr(Session, name)(self, step)

    return method


for _name in METHODS:
    setattr(StruckSession, _name, _struck(_name))


class Adapted(Trained):
    """Beside what a run leaves: its decisions and changes of the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[dict[str, Any]] = []
        self.transitions: list[dict[str, Any]] = []


def train(run_dir: Path, strike: Strike | None = None, **changes: Any) -> Adapted:
    """Run a job under control on workers of its own; return what it leaves, each step's tokens as its digest."""
    config = build_config({**TREE, **changes, "run_dir": os.fspath(run_dir)})
    result = Adapted()
    with LocalEngine("tests.parity.greedy_rank:GreedyRank", memory_per_device_bytes=2 << 30) as engine:
        engine.start(range(config.cluster.devices))
        with StruckSession.open(config, run_id=f"adapted{next(_run_ids)}", engine=engine) as session:
            session._owns_engine = True  # workers come and go with the plan
            if strike is not None:
                session.strike = strike
            drive(session, lambda _, metrics: result.metrics.append(metrics), finish=lambda session: session.finish())
            assert session.newest_state is not None and session.newest_state["step"] == config.steps - 1
            for name in ("actor.training", "critic.training"):
                result.state[name] = read_whole_state(session, engine, name)
    result.metrics = read_records(os.fspath(run_dir / "metrics.jsonl"))
    result.tokens = [metrics["rollouts_digest"] for metrics in result.metrics]
    result.decisions = read_records(os.fspath(run_dir / "decisions.jsonl"))
    result.transitions = read_records(os.fspath(run_dir / "transitions.jsonl"))
    assert [metrics["step"] for metrics in result.metrics] == list(range(config.steps))
    return result


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deaths, "take_wait_s", lambda *_: 0.05)


@pytest.fixture(scope="module")
def fixed(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """The run on one plan that all others are held against."""
    folder = tmp_path_factory.mktemp("fixed")
    return train(folder / "run", plan=uniform_plan(STAGES, 1, 1, 1), adapt={"enabled": False})


def test_devices_go_and_come_back(fixed: Adapted, tmp_path: Path) -> None:
    run = train(tmp_path / "run", drift={"devices": [[0, 2], [3, 1], [6, 2]]})
    assert_same(run, fixed)
    assert [line["outcome"] for line in run.transitions if line["step"] == 3] == ["committed"]
    urgent = next(decision for decision in run.decisions if decision["step"] == 3)
    assert urgent["verdict"] == "urgent" and "devices that are gone" in urgent["reason"]
    assert run.metrics[3]["devices_present"] == [0]
    assert {d for stage in run.metrics[4]["plan"].values() for d in stage["devices"]} == {0}
    entries = Journal(os.fspath(tmp_path / "run")).entries()
    assert [d for entry in entries if entry.kind == "commit" for d in entry.body.get("decisions", ())] == run.decisions
    moved = next(entry.body["decision"] for entry in entries if entry.kind == "transition" and entry.body["step"] == 3)
    assert (moved["verdict"], moved["reason"]) == (urgent["verdict"], urgent["reason"])


# One in the default suite, a few in the long one, and all in the slow one.
MARKS = {"train_critic": (), **dict.fromkeys(("generate", "train_actor", "finish_step", "finish"), pytest.mark.long)}


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=MARKS.get(m, pytest.mark.slow)) for m in (*METHODS, "finish")]
)
def test_a_worker_that_dies_in_mid_step(method: str, fixed: Adapted, tmp_path: Path) -> None:
    """Before any update the step begins anew from live copies, or else from the last commit; nothing is lost.

    The same at the end of the run.
    """
    struck = []

    def strike(session: Session, step: int, name: str) -> None:
        if step in (4, STEPS) and name == method and not struck:
            struck.append(step)
            os.kill(session.worker_pids()[1], signal.SIGKILL)

    assert_same(train(tmp_path / "run", strike), fixed)
    assert struck


def at(step: int, method: str, act: Callable[[Session], None], *, times: int = 1) -> Strike:
    """Return a strike that acts before a method of a step, the first times that it comes to it."""
    struck: list[int] = []

    def strike(session: Session, now: int, name: str) -> None:
        if (now, name) == (step, method) and len(struck) < times:
            struck.append(now)
            act(session)

    return strike


def devices_of(metrics: dict[str, Any]) -> set[int]:
    return {device for stage in metrics["plan"].values() for device in stage["devices"]}


def test_memory_that_really_runs_out(fixed: Adapted, tmp_path: Path) -> None:
    """The allocator refuses: the worker starts afresh, what its memory was is learned, and the step is done again."""

    def hog(session: Session) -> None:
        run_command(session._engine, "hog", {0: {}}, label="hog", step=None)

    run = train(tmp_path / "run", at(3, "train_actor", hog))
    assert_same(run, fixed)
    assert any(decision["step"] == 3 and "lost the state" in decision["reason"] for decision in run.decisions)


@pytest.mark.long
def test_wrong_weights_after_a_move_lead_back_to_the_last_commit(fixed: Adapted, tmp_path: Path) -> None:
    def spoil(session: Session) -> None:
        devices = session.plan["actor.generation"].devices
        run_command(session._engine, "spoil", {device: {} for device in devices}, label="spoil", step=None)

    run = train(tmp_path / "run", at(3, "generate", spoil), drift={"devices": [[0, 2], [3, 1]]})
    assert_same(run, fixed)
    assert [line["outcome"] for line in run.transitions if line["step"] == 3] == ["committed", "recovered"]


@pytest.mark.long
def test_a_notice_moves_the_job_off_the_device(fixed: Adapted, tmp_path: Path) -> None:
    """SIGTERM to a worker: the step goes on, the next one runs elsewhere, and nothing was lost."""

    def notify(session: Session) -> None:
        os.kill(session.worker_pids()[1], signal.SIGTERM)
        deadline = time.monotonic() + 10
        while 1 not in session._engine.notices() and time.monotonic() < deadline:
            time.sleep(0.01)

    run = train(tmp_path / "run", at(3, "score", notify))
    assert_same(run, fixed)
    assert devices_of(run.metrics[3]) == {0, 1} and devices_of(run.metrics[4]) == {0} == devices_of(run.metrics[7])
    assert "device 1 is drained" not in run.decisions[-1]["reason"]


@pytest.mark.long
def test_where_no_move_leads_the_last_commit_does(
    fixed: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan in force has lost its device, and no transfer to another one is possible."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise InfeasibleTransition("there is no room")

    monkeypatch.setattr(nereus.runtime.elastic_steps, "plan_transition", refuse)
    run = train(tmp_path / "run", drift={"devices": [[0, 2], [3, 1]]})
    assert_same(run, fixed)
    outcomes = [line["outcome"] for line in run.transitions if line["step"] == 3]
    assert outcomes == ["rolled_back", "rolled_back", "recovered"]
    assert devices_of(run.metrics[3]) == {0}


@pytest.mark.long
def test_what_is_half_built_again_is_no_state(fixed: Adapted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out on one device as often as the way back to the last commit is tried; then all is built again."""
    refused: list[int] = []
    restore = nereus.runtime.staged_steps.restore_newest

    def refuse(*arguments: Any) -> Any:
        if len(refused) < 3:
            refused.append(0)
            raise CommandError("device 0 ran out of memory", label="restore", device=0, out_of_memory=True)
        return restore(*arguments)

    def kill(session: Session) -> None:
        monkeypatch.setattr(nereus.runtime.staged_steps, "restore_newest", refuse)
        os.kill(session.worker_pids()[1], signal.SIGKILL)

    assert_same(train(tmp_path / "run", at(4, "train_critic", kill)), fixed)
    assert len(refused) == 3


@pytest.mark.long
def test_a_better_plan_that_no_move_leads_to_is_given_up(fixed: Adapted, tmp_path: Path) -> None:
    """Nothing is lost, and nothing built again: the job stays on the plan that it has."""

    def bar(session: Session) -> None:
        def refuse(*_: Any) -> Any:
            raise InfeasibleTransition("there is no way")

        session._plan_move = refuse  # type: ignore[method-assign]

    run = train(
        tmp_path / "run",
        at(0, "generate", bar),
        drift={"devices": [[0, 1], [3, 2]]},
        adapt={"enabled": True, "policy": "every_k", "every": 3},
    )
    assert_same(run, fixed)
    assert [line["outcome"] for line in run.transitions] == ["rolled_back"] * len(run.transitions)
    assert [line["step"] for line in run.transitions].count(3) == MOST_ATTEMPTS
    assert all(devices_of(metrics) == {0} for metrics in run.metrics)


@pytest.mark.long
def test_a_run_that_ends_without_its_state_commits_none(tmp_path: Path) -> None:
    """What a broken step has left in memory is no state; a resume goes on from the last commit."""

    def strike(session: Session) -> None:
        session._lost = frozenset(session.plan.devices)
        session.settle()

    run_dir = tmp_path / "run"
    train(run_dir, at(3, "train_critic", strike), staging={"every": 8}, steps=8)
    commits = [entry.body["step"] for entry in Journal(os.fspath(run_dir)).entries() if entry.kind == "commit"]
    assert commits == [7]


@pytest.mark.long
def test_a_deadline_that_passes_in_mid_step_is_a_loss(fixed: Adapted, tmp_path: Path) -> None:
    def drain(session: Session) -> None:
        tell_drain(session.run_dir, 1, time.time())
        pid, deadline = session.worker_pids()[1], time.monotonic() + 20
        while session.worker_pids().get(1) == pid and time.monotonic() < deadline:
            time.sleep(0.05)

    run = train(tmp_path / "run", at(3, "infer_values", drain))
    assert_same(run, fixed)
    assert all(devices_of(metrics) == {0} for metrics in run.metrics[3:])


@pytest.mark.long
def test_a_device_that_dies_three_times_is_used_no_more(fixed: Adapted, tmp_path: Path) -> None:
    def kill(session: Session) -> None:
        pid = session.worker_pids().get(1)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    run = train(tmp_path / "run", at(2, "score", kill, times=3))
    assert_same(run, fixed)
    assert all(devices_of(metrics) == {0} for metrics in run.metrics[2:])
