"""The clock of a step: what is interrupted, and what is done again."""

from __future__ import annotations

import pytest

from nereus.runtime import timing
from nereus.runtime.command_times import CommandTimes
from nereus.runtime.timing import StepClock

STAGES = ("generation", "transition", "staging")


class Now:
    """A clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    now = Now()
    monkeypatch.setattr(timing, "time", now)
    return now


def spend(clock: StepClock, now: Now, stage: str, seconds: float) -> None:
    with clock.span(stage):
        now.seconds += seconds


def test_moves_are_no_work_of_a_step(now: Now):
    clock = StepClock()
    spend(clock, now, "transition", 2.0)
    spend(clock, now, "generation", 3.0)
    spend(clock, now, "transition", 1.0)
    assert clock.work_s() == 3.0
    assert clock.seconds(STAGES) == {
        "generation": 3.0, "transition": 3.0, "staging": 0.0, "orchestration": 0.0, "total": 6.0,
    }  # fmt: skip


def test_a_step_that_begins_again_is_measured_alone(now: Now):
    clock = StepClock()
    spend(clock, now, "transition", 2.0)
    spend(clock, now, "generation", 20.0)
    clock.times.note("actor.generation", "generate", {0: CommandTimes(20.0)})
    clock.begin_again()
    spend(clock, now, "transition", 4.0)
    spend(clock, now, "generation", 30.0)
    clock.times.note("actor.generation", "generate", {0: CommandTimes(30.0)})
    assert clock.work_s() == 30.0 and clock.times.tasks_s() == {"actor.generation/generation": 30.0}
    seconds = clock.seconds(STAGES)
    assert (seconds["generation"], seconds["transition"], seconds["total"]) == (30.0, 6.0, 56.0)
