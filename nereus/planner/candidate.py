"""What the planner hands out: plans that fit, what they cost, and why the others are worse or impossible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from nereus.cost.memory import MemoryPeak, estimate_memory
from nereus.cost.step import StepCost, estimate_step
from nereus.plan import Plan
from nereus.planner.fit import Fitted
from nereus.planner.setting import Setting


@dataclass(frozen=True, eq=False)
class Candidate:
    """A plan that fits memory, and the predicted seconds of its step; what the step is made of is worked out if asked.

    `why` says for a runner-up why it is worse than the best plan.
    """

    plan: Plan
    step_s: float
    setting: Setting
    why: str = ""

    @classmethod
    def of(cls, fitted: Fitted, setting: Setting) -> Candidate:
        return cls(fitted.plan(setting), fitted.work_s + setting.efficiencies.step_s, setting)

    @cached_property
    def cost(self) -> StepCost:
        """Seconds by stage, model-stage and operation class."""
        setting = self.setting
        return estimate_step(self.plan, setting.job, setting.cluster, setting.efficiencies)

    @cached_property
    def peaks(self) -> Mapping[int, MemoryPeak]:
        """Predicted peak of every device in bytes, not yet corrected by measured ones."""
        setting = self.setting
        return estimate_memory(self.plan, setting.job.specs, setting.workload, setting.job.precision)


@dataclass(frozen=True)
class Search:
    """The best plan; runners-up, fastest first; and plans that would be faster but don't fit, with the reason."""

    best: Candidate
    runners_up: tuple[Candidate, ...] = ()
    infeasible: tuple[tuple[Plan, str], ...] = ()
