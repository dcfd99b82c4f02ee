"""What a policy came to, in the numbers of `nereus simulate --json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nereus.plan import Plan
from nereus.simulator.executor import Spent
from nereus.transition.price import moves_state


@dataclass(frozen=True)
class PolicyRun:
    """One policy's run: its account of time, and what it decided.

    Attributes:
        spent: in order; one "step" entry a finished step.
        ended_by: why it did not survive to the last step; None if it did.
        gaps: per finished step L(plan) / L(best feasible plan) - 1 under the noise-free truth.
    """

    policy: str
    spent: tuple[Spent, ...]
    decisions: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[tuple[int, str], ...] = ()
    ended_by: str | None = None
    gaps: tuple[float, ...] = field(default=())

    @property
    def steps(self) -> int:
        """Steps survived."""
        return sum(entry.kind == "step" for entry in self.spent)

    def seconds(self, num_steps: int | None = None) -> float:
        """Return all seconds of the first steps, transitions and broken attempts included; None: of all survived."""
        limit = self.steps if num_steps is None else num_steps
        return sum(entry.seconds for entry in self.spent if entry.step < limit)

    def step_seconds(self) -> list[float]:
        """Return by finished step its seconds with all that was spent on it."""
        totals = [0.0] * self.steps
        for entry in self.spent:
            if entry.step < len(totals):
                totals[entry.step] += entry.seconds
        return totals

    def plans(self) -> list[tuple[int, Plan]]:
        """Return (step, plan) of step 0 and of every change of layout, dp or devices."""
        changes: list[tuple[int, Plan]] = []
        for entry in self.spent:
            if entry.kind == "step" and (not changes or moves_state(changes[-1][1], entry.plan)):
                changes.append((entry.step, entry.plan))
        return changes

    def changes(self) -> list[tuple[int, bool]]:
        """Return (step, whether tp or pp changed) of every transition."""
        return [(entry.step, entry.changes_layout) for entry in self.spent if entry.kind == "transition"]

    def to_record(self, oracle: PolicyRun | None = None) -> dict[str, Any]:
        """Return the policy's entry of the JSON document."""
        moves = [entry for entry in self.spent if entry.kind == "transition" and entry.step < self.steps]
        total = self.seconds()
        transition_s = sum(entry.seconds for entry in moves)
        return {
            "steps": self.steps,
            "mean_step_s": total / self.steps if self.steps else None,
            "total_s": total,
            "transitions": len(moves),
            "layout_transitions": sum(entry.changes_layout for entry in moves),
            "transition_s": transition_s,
            "layout_transition_s": sum(entry.seconds for entry in moves if entry.changes_layout),
            "transition_share": transition_s / total if total else 0.0,
            "oom_steps": len({entry.step for entry in self.spent if entry.kind == "out of memory"}),
            "mean_gap_to_best_plan": sum(self.gaps) / len(self.gaps) if self.gaps else None,
            "regret_to_oracle": self.regret(oracle),
            "ended_by": self.ended_by,
            "plans": [{"step": step, "plan": plan.to_record()} for step, plan in self.plans()],
            "warnings": [{"step": step, "warning": text} for step, text in self.warnings],
        }

    def regret(self, oracle: PolicyRun | None) -> float | None:
        """Return total time over the oracle's over the steps that both survived, minus 1."""
        both = min(self.steps, oracle.steps) if oracle is not None else 0
        if oracle is None or not both:
            return None
        return self.seconds(both) / oracle.seconds(both) - 1.0


def saving(run: PolicyRun, other: PolicyRun) -> float:
    """Return by what share `run` is below `other` over the steps that both survived."""
    both = min(run.steps, other.steps)
    return 1.0 - run.seconds(both) / other.seconds(both)
