"""Metrics reach accelerate's trackers."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nereus.config import RunConfig
from nereus.tracking import Trackers, flatten_numbers, open_trackers


def test_tensorboard_gets_every_number_of_every_step(tmp_path: Path):
    with open_trackers(["tensorboard"], str(tmp_path), RunConfig()) as trackers:
        for step in range(3):
            trackers.log(step, {"reward_mean": step / 4, "seconds": {"total": 2.0}, "rollouts_digest": "ab"})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward_mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert [event.value for event in events.Scalars("seconds/total")] == [2.0, 2.0, 2.0]


class BrokenTracker:
    name = "broken"

    def log(self, values, step):
        raise ConnectionError("no network")

    def finish(self):
        raise ConnectionError("no network")


def test_a_tracker_that_fails_is_warned_of_once_and_disturbs_nobody(caplog: pytest.LogCaptureFixture):
    logged, finished = [], []
    fine = SimpleNamespace(
        name="fine", log=lambda values, step: logged.append(step), finish=lambda: finished.append(True)
    )
    with Trackers([BrokenTracker(), fine]) as trackers:
        for step in range(3):
            trackers.log(step, {"reward_mean": 1.0})
    assert (logged, finished) == ([0, 1, 2], [True])
    assert [record.getMessage() for record in caplog.records] == [
        "The tracker broken failed (no network); the run goes on."
    ]


def test_no_tracker_needs_no_package():
    with open_trackers([], "runs/none", RunConfig()) as trackers:
        trackers.log(0, {"reward_mean": 1.0})


def test_only_numbers_are_sent():
    line = {"step": 3, "plan": {"actor.training": {"dp": 2, "recompute": False, "devices": [0, 1]}}, "digest": "x"}
    assert flatten_numbers(line) == {"step": 3, "plan/actor.training/dp": 2}
