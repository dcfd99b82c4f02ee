"""The control loop around one step: look, decide, move, run, learn. One loop for a job and for the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nereus.controller.adaptation import Adaptation, Surroundings
from nereus.controller.decision import Decision, NoPlanError, StepOutcome
from nereus.plan import Plan


class Executor(Protocol):
    """What acts: a running job, or the simulator in virtual time."""

    def look(self, step: int, plan: Plan) -> Surroundings:
        """Return what there is at the boundary before a step."""
        ...

    def apply(self, decision: Decision) -> float:
        """Carry a decision's transition out and return the seconds it took."""
        ...

    def run_step(self, step: int, plan: Plan) -> StepOutcome:
        """Run one step under a plan."""
        ...


@dataclass
class ControlLoop:
    """One job under control, and what acts for it."""

    adaptation: Adaptation
    executor: Executor

    def run(self, num_steps: int, each: Callable[[StepOutcome], None] = lambda _: None) -> str | None:
        """Run steps 0 to num_steps - 1; return why it ended earlier, or None."""
        step = 0
        while step < num_steps:
            try:
                outcome = self.advance(step)
            except NoPlanError as error:
                return str(error)
            each(outcome)
            step += outcome.completed
        return None

    def advance(self, step: int) -> StepOutcome:
        """Decide at the boundary before a step, move if that was decided, run the step and learn from it.

        Raises:
            NoPlanError: nothing that the policy may choose runs on the devices there are.
        """
        controller = self.adaptation.controller
        decision = self.adaptation.decide(step, self.executor.look(step, controller.plan))
        if decision is not None and decision.moves:
            controller.note_transition(self.executor.apply(decision))
        outcome = self.executor.run_step(step, controller.plan)
        self.adaptation.learn(outcome)
        return outcome
