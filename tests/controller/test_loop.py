"""The control loop around a step: what it tells the controller of what was measured."""

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nereus.catalog import cluster_preset
from nereus.controller.adaptation import Adaptation, Surroundings, find_minor
from nereus.controller.controller import Settings
from nereus.controller.decision import Boundary, NoPlanError, StepOutcome
from nereus.controller.loop import ControlLoop
from nereus.cost.calibration import Calibration
from nereus.cost.efficiency import CLASSES, CONSERVATIVE
from nereus.cost.load import StepLoad
from nereus.cost.operations import Operations
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan

PLAN = Plan.of({"actor.training": StagePlan(2, Layout(), (0, 1), 1)})


class Doubtful(Calibration):
    """A calibration that knows gemm to 9% and decode to 11%, one standard deviation each."""

    def uncertainty(self) -> dict[str, float]:
        return {"gemm": 0.09, "decode": 0.11}


@dataclass
class Fake:
    """Controller, executor and predictor in one: keeps the plan, and notes every boundary."""

    outcomes: list[StepOutcome]
    boundaries: list[Boundary] = field(default_factory=list)
    plan: Plan = PLAN
    settings: Settings = field(default_factory=Settings)
    most_tokens: float = math.inf  # of responses that some plan fits
    answers: list[Any] = field(default_factory=list)

    def decide(self, boundary: Boundary, efficiencies: Any) -> Any:
        self.boundaries.append(boundary)
        if boundary.memory_tokens > self.most_tokens:
            raise NoPlanError(f"no plan for {boundary.memory_tokens:g} tokens")
        return self.answers.pop() if self.answers else None

    def note_step(self, step: int, seconds: float) -> None:
        pass

    def look(self, step: int, plan: Plan) -> Surroundings:
        return Surroundings(cluster_preset("a100-64gb-hdr", 2))

    def run_step(self, step: int, plan: Plan) -> StepOutcome:
        return self.outcomes.pop(0)

    def operations(self, *_: Any) -> dict[str, Any]:
        return {}

    def peaks(self, *_: Any) -> dict[int, int]:
        return {0: 100, 1: 100}


def run(
    *outcomes: StepOutcome, cap_tokens: int | None = None, most_tokens: float = math.inf
) -> tuple[Adaptation, list[Boundary]]:
    fake = Fake(list(outcomes), most_tokens=most_tokens)
    load = StepLoad(8, 1, 10, 100, 120)
    adaptation = Adaptation(fake, Doubtful(), fake, load, cap_tokens)  # type: ignore[arg-type]
    num_steps = sum(outcome.completed for outcome in outcomes)
    assert ControlLoop(adaptation, fake).run(num_steps) is None  # type: ignore[arg-type]
    return adaptation, fake.boundaries


def outcome(step: int, p95: float, **more: Any) -> StepOutcome:
    return StepOutcome(step, 1.0, response_tokens=p95 / 1.2, response_tokens_p95=p95, **more)


def test_an_efficiency_is_sure_when_two_deviations_are_within_its_threshold():
    _, (boundary,) = run(outcome(0, 120))
    assert boundary.signals.unsure == {"decode"}


def test_memory_is_predicted_for_the_last_length_and_its_growth_once_more_up_to_the_cap():
    outcomes = [outcome(0, 120), outcome(1, 180), outcome(2, 150), outcome(3, 150)]
    assert [b.memory_tokens for b in run(*outcomes)[1]] == [120, 120, 240, 150]
    assert [b.memory_tokens for b in run(*outcomes, cap_tokens=200)[1]] == [120, 120, 200, 150]


def test_where_nothing_fits_what_lengths_may_come_to_they_are_taken_as_they_are():
    adaptation, boundaries = run(outcome(0, 120), outcome(1, 180), outcome(2, 180), most_tokens=200)
    assert [b.memory_tokens for b in boundaries] == [120, 120, 240, 180]
    assert adaptation.memory_tokens == 180  # nothing is assumed any more


def test_before_the_first_step_ever_shorter_responses_are_tried():
    assert [b.memory_tokens for b in run(outcome(0, 20), most_tokens=40)[1]] == [120, 60, 30]
    with pytest.raises(AssertionError, match="no plan for 120 tokens"):  # the first failure says what is wanted
        run(outcome(0, 20), most_tokens=0.5)


def test_lengths_that_were_drawn_are_no_guess_in_the_first_step_either():
    fake = Fake([], most_tokens=40)
    adaptation = Adaptation(fake, Calibration(), fake, StepLoad(8, 1, 10, 50, 60, response_tokens_longest=60))  # type: ignore[arg-type]
    with pytest.raises(NoPlanError):
        adaptation.decide(0, fake.look(0, PLAN))
    assert [(boundary.memory_tokens, boundary.drawn) for boundary in fake.boundaries] == [(60, False), (60, True)]


def test_free_memory_of_the_plan_before_a_move_says_nothing_of_the_new_one():
    fake = Fake([])
    adaptation = Adaptation(fake, Calibration(), fake, StepLoad(8, 1, 10, 100, 120))  # type: ignore[arg-type]
    around = fake.look(0, PLAN)
    adaptation.decide(0, around)
    adaptation.learn(outcome(0, 120, peak_bytes={0: 130.0}))
    fake.answers = [SimpleNamespace(moves=True)]
    for step in (1, 1, 2):
        adaptation.decide(step, around)
    adaptation.learn(outcome(2, 120, peak_bytes={0: 140.0}))
    adaptation.decide(3, around)
    known = [boundary.signals.free_memory_bytes is not None for boundary in fake.boundaries]
    assert known == [False, True, False, False, True]


def test_a_pause_that_is_predicted_is_not_counted_again():
    fake = Fake([])
    fake.operations = lambda *_: {"staging": Operations(work_s={"storage_write": np.asarray(3.0)})}  # type: ignore[method-assign]
    adaptation = Adaptation(fake, Calibration(), fake, StepLoad(8, 1, 10, 100, 120))  # type: ignore[arg-type]
    adaptation.cluster = cluster_preset("a100-64gb-hdr", 2)
    written_s = 3.0 / adaptation.calibration.efficiencies().efficiency["storage_write"]
    adaptation.learn(StepOutcome(0, written_s + 2.0, stages_s={"actor.generation/generation": 1.0}))
    assert adaptation.calibration.efficiencies().step_s == pytest.approx(2.0)  # 1 s of the write is hidden


def test_a_step_that_broke_off_is_done_again_and_teaches_of_memory_only():
    broken = StepOutcome(0, 0.5, completed=False, peak_bytes={0: 130.0})
    loop, boundaries = run(broken, outcome(0, 120))
    assert [boundary.step for boundary in boundaries] == [0, 0]
    assert boundaries[1].signals.response_tokens is None
    assert boundaries[1].memory_factor > boundaries[0].memory_factor
    assert loop.load.response_tokens == pytest.approx(100)


def test_responses_at_the_cap_are_warned_of_once_a_step():
    loop, _ = run(outcome(0, 120, share_at_cap=0.2), outcome(1, 120, share_at_cap=0.9), cap_tokens=130)
    assert [step for step, _ in loop.warnings] == [1]


def test_what_hardly_takes_time_is_no_sign_of_drift():
    step = {"gemm": np.asarray(0.5), "weight_sync": np.asarray(0.005)}
    assert find_minor([Operations(work_s=step)], CONSERVATIVE) == set(CLASSES) - {"gemm"}
    assert find_minor([], CONSERVATIVE) == frozenset()  # nothing is known yet
