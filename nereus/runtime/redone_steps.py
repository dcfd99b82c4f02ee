"""Steps of PPO that are done again: after a device was lost, memory ran out, or a change of the plan went wrong.

the step | a device is lost, or memory runs out, or its numbers are wrong
make_ready -> decide -> transition: from what lives at the step's start, or else from the last commit -> the step again
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from nereus.controller.decision import StepOutcome
from nereus.ppo.kl import KlController
from nereus.runtime.adaptive_steps import AdaptiveSteps, MemoryShort, drawn_lengths
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.opening import OpenRun
from nereus.runtime.state_check import StateAlarm, StateCheck

logger = logging.getLogger(__name__)

# A step that is broken off is tried again, this often in all.
MOST_TRIES = 4
# What is predicted of memory grows at most so much by one error of an allocator.
MOST_LIFT = 1.25
# What a step fails with that may be done again.
STEP_FAILURES = (CommandError, MemoryShort, StateAlarm)


class RedoneSteps(AdaptiveSteps):
    """PPO steps of which none is lost: one that was broken off begins anew, with the same samples."""

    def __init__(self, run: OpenRun, engine: Engine, *, owns_engine: bool) -> None:
        super().__init__(run, engine, owns_engine=owns_engine)
        self._is_updating = False  # the step in flight has begun to change what is trained
        self._kl_before: KlController = self.kl  # at the start of the step in flight
        self._tries: dict[int, int] = {}
        self._moved_before: int | None = None  # the step before which the plan has changed last
        self._alarmed: set[int] = set()
        self._state_check = StateCheck(self.config.precision)

    def run_transition(self, submit: Any = None) -> dict[str, Any]:
        """Carry the begun transition out, or back; return its line of transitions.jsonl."""
        line = super().run_transition(submit)
        if line["outcome"] != "rolled_back":
            self._moved_before = self.next_step
        return line

    def generate(self, step: int) -> dict[str, Any]:
        """Draw the step's rollouts; from here on until the first update its start can be had again from memory."""
        self._is_updating, self._kl_before = False, self.kl
        return super().generate(step)

    def _before_update(self, model_stage: str) -> None:
        self._is_updating = True
        super()._before_update(model_stage)

    def _learn(self, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Look whether the step can be right, before anything is made of it.

        Raises:
            StateAlarm: the plan has changed before this step, and its numbers say that the state isn't what it was.
        """
        self._state_check.check(metrics, is_first=self._moved_before == metrics["step"])
        super()._learn(outcome, metrics)
        self._is_updating = False

    def make_ready(self, step: int, error: Exception) -> dict[str, Any]:
        """Make ready to do a step again that was broken off; what was lost is known at its next `decide`.

        Raises:
            CommandError: as it was, where the step can't be done again: nothing may change, it failed again and again,
                or it was no loss of a device or of memory.
        """
        if isinstance(error, StateAlarm):
            return self._distrust(step, error)
        if self._adaptation is None:
            raise error
        self._tries[step] = self._tries.get(step, 0) + 1
        full = error.device if isinstance(error, CommandError) and error.out_of_memory else None
        is_memory = isinstance(error, MemoryShort) or full is not None
        dead = set(self.plan.devices) - set(self._engine.pids())
        if self._tries[step] >= MOST_TRIES or not (dead or is_memory):
            raise error
        if full is not None:
            self._learn_of_memory(step, full)
        if self._engine.broken is not None:
            if self._devices is not None:
                self._devices.hear_notices(self._engine)  # other workers may be in the place of those that were told
            self._engine.recover(step=step, may_shrink=True)
            self._is_torn = True
        lost = set(self.plan.devices) if self._is_updating or self._is_given_up else dead
        if full is not None:
            lost.add(full)
            if self._staging is not None:
                self._staging.wait()  # these workers write the pending commit: the one to go back to
            self._start_afresh(lost)
        self._forget_step(lost)
        logger.warning("step %d: %s; it is done again.", step, str(error).rstrip("."))
        return {"step": step, "lost": sorted(dead), "reason": str(error)}

    def _distrust(self, step: int, error: StateAlarm) -> dict[str, Any]:
        """Give up what is in memory, once for a step: the run goes on from its last commit."""
        if step in self._alarmed:
            raise error
        self._alarmed.add(step)
        self._forget_step(self.plan.devices)
        logger.warning("%s; the run goes on from its last commit.", error)
        return {"step": step, "lost": [], "reason": str(error)}

    def _forget_step(self, lost: Collection[int]) -> None:
        """Take back what the step in flight has changed in the driver; `lost` devices hold nothing of use."""
        self._lost = frozenset(lost)
        self._is_updating, self.kl, self._rollouts = False, self._kl_before, None
        self._clock.begin_again()

    def _learn_of_memory(self, step: int, device: int) -> None:
        """Take in that a device needed more than it has.

        Whatever its peak would have been, it was above the cap, or else not this plan's: one error lifts the prediction
        by a quarter at most.
        """
        assert self._adaptation is not None
        self._adaptation.controller.plan = self.plan
        outcome = StepOutcome(step, 0.0, completed=False, out_of_memory=(device,))
        if self._rollouts is not None:
            outcome = replace(outcome, **drawn_lengths(self._rollouts))
        predicted = self._adaptation.memory_factor * self._adaptation.predict_peaks(outcome)[device]
        peak = min(float(self.job.capacities[device]), MOST_LIFT * predicted)
        self._adaptation.learn(replace(outcome, peak_bytes={device: peak}))
