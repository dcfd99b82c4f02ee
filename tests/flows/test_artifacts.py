"""Artifacts are a view: no fault of theirs ends a run."""

import pytest

import tasks.artifacts
from tasks.artifacts import ProgressArtifact, publish_plan, publish_plots


def refuse(*_: object, **__: object) -> None:
    raise ConnectionError("no server")


def test_what_cannot_be_shown_is_warned_of_once_each(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in ("create_table_artifact", "create_markdown_artifact", "update_progress_artifact"):
        monkeypatch.setattr(tasks.artifacts, name, refuse)
    monkeypatch.setattr(tasks.artifacts, "create_progress_artifact", lambda *_, **__: "an-id")
    monkeypatch.setattr(ProgressArtifact, "MIN_INTERVAL_S", 0.0)
    publish_plan({"actor.training": {"dp": 2}})
    progress = ProgressArtifact(3)
    for step in range(3):
        progress.update(step, {})
    publish_plots([])
    warned = [record.getMessage().split(" can't")[0] for record in caplog.records if record.name == "tasks.artifacts"]
    assert warned == ["The plan", "The progress", "The plots"]


def test_plots_that_cannot_be_drawn_end_no_run(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(tasks.artifacts, "draw_run_pngs", refuse)
    publish_plots([{"step": 0}])
    assert "The plots can't be shown" in caplog.text
