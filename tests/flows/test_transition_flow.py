"""Changes of the plan in the flow, on a real Prefect API: what runs as a task, what it is called, and what is shown."""

from __future__ import annotations

import io
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import TaskRun
from prefect.task_runners import ThreadPoolTaskRunner
from rich.console import Console

import flows.ppo
import tasks.adapt
import tasks.ppo
import tasks.transition
from nereus.config import RunConfig, load_config
from nereus.progress import Event, watch
from nereus.terminal import RunView
from tests.flows.fake_session import FakeSession, find_session
from tests.flows.fake_transition import random_graph

LIMIT_S = 30.0

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture(autouse=True)
def _fake_session(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flows.ppo, "Session", FakeSession)
    for module in (tasks.adapt, tasks.ppo, tasks.transition):
        monkeypatch.setattr(module, "find_session", find_session)
    monkeypatch.setattr(FakeSession, "opened", {})
    monkeypatch.setattr(FakeSession, "graphs", {})


def config_in(folder: Path, *overrides: str) -> RunConfig:
    return load_config("tiny-cpu", [f"run_dir={folder / 'amber'}", *overrides])


def read_until(read: Callable[[], Any], is_there: Callable[[Any], bool]) -> Any:
    """Return what the API says once it says enough: states reach it a moment later."""
    deadline = time.monotonic() + LIMIT_S
    while not is_there(found := read()):
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def runs_of(flow_run_id: str, is_there: Callable[[list[TaskRun]], bool]) -> list[TaskRun]:
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
        return read_until(lambda: client.read_task_runs(flow_run_filter=wanted, limit=200), is_there)


def test_every_primitive_is_a_task_with_its_bytes_its_seconds_and_what_it_waits_for(tmp_path: Path):
    FakeSession.graphs[1] = graph = random_graph(seed=3, num_primitives=30)
    flows.ppo.train_ppo(config_in(tmp_path, "steps=2"))
    session = FakeSession.opened["amber"]
    assert sorted(session.transitions[0].ended) == sorted(graph.by_id)
    assert [at for _, at in session.calls] == sorted(at for _, at in session.calls)
    assert session.calls.index(("begin_transition", 1)) < session.calls.index(("generate", 1))

    def primitives(found: list[TaskRun]) -> list[TaskRun]:
        return [run for run in found if run.name.endswith(" s")]

    assert session.flow_run_id is not None
    found = runs_of(session.flow_run_id, lambda found: len(primitives(found)) == 30)
    names = {run.name for run in primitives(found)}
    assert names == {
        f"{name} {what}, 0.25 s"
        for name in ("actor.generation", "actor.training", "critic.training")
        for what in ("extend, 3.00 MiB direct", "reshard, 3.00 MiB direct", "destroy")
    }
    waits = [len(run.task_inputs.get("wait_for", [])) for run in primitives(found)]
    # One that frees after the commit has nothing left to wait for.
    assert sum(waits) == sum(len(part.depends_on) for part in graph.primitives if not part.after_commit)
    assert "transition-1" in {run.name for run in found}


def test_a_large_graph_has_a_task_for_each_model_stage_and_kind(tmp_path: Path):
    FakeSession.graphs[0] = graph = random_graph(seed=1, num_primitives=60)
    flows.ppo.train_ppo(config_in(tmp_path, "steps=1"))
    session = FakeSession.opened["amber"]
    assert sorted(session.transitions[0].ended) == sorted(graph.by_id)
    assert session.flow_run_id is not None

    def grouped(found: list[TaskRun]) -> list[str]:
        return sorted(run.name for run in found if " x " in run.name and "at most" in run.name)

    found = grouped(runs_of(session.flow_run_id, lambda found: len(grouped(found)) >= 9))
    assert len(found) == 9
    assert found[0] == "actor.generation 6 x destroy, 0.25 s at most"
    assert found[1] == "actor.generation 7 x extend, 21.00 MiB direct, 0.25 s at most"


@pytest.mark.parametrize("num_primitives", [20, 60])
def test_a_failed_change_leaves_the_flow_running_on_the_old_plan(
    num_primitives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    FakeSession.graphs[2] = graph = random_graph(seed=5, num_primitives=num_primitives)
    monkeypatch.setattr(FakeSession, "fail_primitive", graph.primitives[4].id)
    monkeypatch.setattr(FakeSession, "set_back_to", 1)
    plotted: list[int] = []
    monkeypatch.setattr(
        flows.ppo, "publish_plots", lambda history, *_: plotted.extend(line["step"] for line in history)
    )
    events: list[Event] = []
    with watch(events.append):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=3"))
    session = FakeSession.opened["amber"]
    assert session.closed and session.plan == graph.current
    ends = [(event.kind, event.step) for event in events if event.kind in ("step", "transition")]
    assert ends == [("step", 0), ("step", 1), ("transition", 2), ("step", 1), ("step", 2)]
    assert plotted == [0, 1, 2]


def test_a_change_that_can_not_begin_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    FakeSession.graphs[1] = random_graph(seed=2, num_primitives=5)
    monkeypatch.setattr(FakeSession, "fail_at", ("begin_transition", 1))
    with pytest.raises(RuntimeError, match="device 1 died in begin_transition of step 1"):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=3"))
    assert FakeSession.opened["amber"].closed


@pytest.mark.parametrize("seed", range(5))
def test_primitives_that_wait_for_each_other_never_fill_up_the_task_runner(seed: int):
    """Two threads are enough for any graph."""
    graph = random_graph(seed, num_primitives=random.Random(seed).randint(20, 30))

    @flow(task_runner=ThreadPoolTaskRunner(max_workers=2))  # type: ignore[arg-type]
    def change() -> dict[str, Any]:
        with tasks.transition.choose_submit("amber", graph) as submit:
            return session.run_transition(submit)

    FakeSession.graphs[0] = graph
    session = FakeSession.opened["amber"] = FakeSession(RunConfig(), "amber")
    session.begin_transition(0)
    assert change()["outcome"] == "committed"


def test_the_graph_is_shown_before_and_with_its_seconds_after(tmp_path: Path):
    FakeSession.graphs[1] = random_graph(seed=3, num_primitives=4)
    flows.ppo.train_ppo(config_in(tmp_path, "steps=2"))
    session = FakeSession.opened["amber"]
    with get_client(sync_client=True) as client:
        wanted = FlowRunFilter(id=FlowRunFilterId(any_=[session.flow_run_id]))
        shown = [found for found in client.read_artifacts(flow_run_filter=wanted) if found.key == "transition"]
    texts = [str(artifact.data) for artifact in sorted(shown, key=lambda artifact: artifact.created)]
    assert len(texts) == 2 and all("```mermaid\nflowchart LR\n" in text for text in texts)
    assert "actor.training 2x1x1 on 0,1 -> 1x2x1 on 0,1" in texts[0]
    assert "0.01 s" in texts[0] and "planned" in texts[0]
    assert "| actor.training/extend/1 | actor.generation/extend/0 | 3.00 MiB direct | 0.01 |" in texts[0]
    assert "0.25 s" in texts[1] and "12.00 MiB in 1.50 s, committed" in texts[1]


def test_a_change_is_one_line_in_the_terminal(tmp_path: Path):
    FakeSession.graphs[1] = graph = random_graph(seed=3, num_primitives=3)
    output = io.StringIO()
    with RunView(Console(file=output, width=100)) as view, watch(view):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=2"))
    lines = output.getvalue().splitlines()
    (at,) = [number for number, line in enumerate(lines) if "committed" in line]
    assert lines[at].startswith("plan  actor.generation 2x1x1 on 0,1 -> 1x2x1 on 0,1; actor.training")
    assert lines[at].endswith(": 9.00 MiB in 1.50 s, committed")
    assert lines[at + 1].split()[0] == "1" and len(lines) == at + 2  # the plan is not told twice
    assert graph.target == FakeSession.opened["amber"].plan
