"""Artifacts are a view: no fault of theirs ends a run."""

import pytest

import tasks.artifacts
from tasks.artifacts import (
    ProgressArtifact,
    StateArtifact,
    publish_decisions,
    publish_plan,
    publish_plots,
    publish_transition,
)
from tests.flows.fake_transition import random_graph
from tests.report.sample_run import SampleRun


def refuse(*_: object, **__: object) -> None:
    raise ConnectionError("no server")


def test_what_cannot_be_shown_is_warned_of_once_each(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in ("create_table_artifact", "create_markdown_artifact", "update_progress_artifact"):
        monkeypatch.setattr(tasks.artifacts, name, refuse)
    monkeypatch.setattr(tasks.artifacts, "create_progress_artifact", lambda *_, **__: "an-id")
    monkeypatch.setattr(ProgressArtifact, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(StateArtifact, "MIN_INTERVAL_S", 0.0)
    publish_plan({"actor.training": {"dp": 2}})
    publish_decisions([])
    publish_transition(3, random_graph(seed=0, num_primitives=2), {})
    progress, staged = ProgressArtifact(range(3)), StateArtifact("runs/amber")
    for step in range(3):
        progress.update(step, {})
        staged.update({"step": step, "url": "runs/amber/state/step-00000000-1"})
    publish_plots([])
    warned = [record.getMessage().split(" can't")[0] for record in caplog.records if record.name == "tasks.artifacts"]
    assert warned == ["The plan", "The decisions", "The transition", "The progress", "The staged state", "The plots"]


def test_the_newest_state_is_shown_now_and_then_and_at_the_end(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    monkeypatch.setattr(tasks.artifacts, "create_markdown_artifact", lambda text, **_: shown.append(text))
    staged = StateArtifact("s3://key:secret@bucket/amber")
    staged.update(None)
    for step in range(3):
        staged.update({"step": step, "url": f"s3://key:secret@bucket/amber/state/step-{step:08d}-1"})
    staged.update({"step": 2, "url": "s3://key:secret@bucket/amber/state/step-00000002-1"}, is_last=True)
    assert ["step-00000000-1" in shown[0], "step-00000002-1" in shown[1], len(shown)] == [True, True, 2]
    assert "`nereus resume s3://bucket/amber`" in shown[1] and "secret" not in "".join(shown)


def test_plots_that_cannot_be_drawn_end_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(tasks.artifacts, "draw_run_pngs", refuse)
    publish_plots([{"step": 0}])
    assert "The plots can't be shown" in caplog.text


def test_decisions_are_a_table_of_what_was_predicted_and_measured(monkeypatch: pytest.MonkeyPatch):
    shown: list[tuple[list[dict[str, str]], str]] = []
    monkeypatch.setattr(
        tasks.artifacts, "create_table_artifact", lambda rows, *, description, **_: shown.append((rows, description))
    )
    run = SampleRun()
    publish_decisions(run.decisions, run.transitions)
    publish_decisions(run.decisions * 100)
    (rows, text), (many, _) = shown
    assert [(row["before step"], row["verdict"]) for row in rows[:3]] == [
        ("5", "refuse"),
        ("7", "admit"),
        ("10", "urgent"),
    ]
    assert rows[1]["measured move"] == "0.44 s" and "The plan needs devices that are gone" in rows[2]["reason"]
    assert text.startswith("Decisions: 2 refuse, 2 admit, 2 urgent, 1 keep;")
    assert len(many) == tasks.artifacts.MOST_DECISIONS and many[-1] == rows[-1]


def test_plots_are_the_reports_pictures(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    monkeypatch.setattr(tasks.artifacts, "create_markdown_artifact", lambda text, **_: shown.append(text))
    run = SampleRun()
    publish_plots(run.metrics, run.decisions, run.transitions)
    titles = [line.removeprefix("## ") for line in shown[0].splitlines() if line.startswith("## ")]
    assert titles[:3] == ["Plans over the steps", "Against the first plan", "Reward"]
    assert shown[0].count("data:image/png;base64,") == len(titles) and len(shown[0]) < 1_500_000
