"""What the controller is told at a boundary, and the record of what it decided: every replan leaves one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nereus.cluster import Cluster
from nereus.controller.monitor import Signals
from nereus.cost.efficiency import Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.rank_memory import Workload
from nereus.plan import Plan
from nereus.transition.price import TransitionPrice, changes_layout, moves_state

Verdict = Literal["admit", "refuse", "urgent", "keep"]


@dataclass(frozen=True)
class Boundary:
    """A safe boundary as the controller sees it: what there is for the next step, and what the last one showed.

    Attributes:
        step: the step about to begin.
        cluster: the devices that are there for it.
        load: its expected work, as far as the last step tells.
        memory_tokens: response length that memory is predicted for.
        lost: devices whose memory is gone; those that left with notice can still be read.
        memory_factor: what predicted peaks are to be multiplied by, as measured peaks have it.
        drawn: the responses of `load` are in hand; else memory must take as many of the longest as there are samples.
    """

    step: int
    cluster: Cluster
    load: StepLoad
    memory_tokens: float
    signals: Signals = field(default_factory=Signals)
    lost: frozenset[int] = frozenset()
    memory_factor: float = 1.0
    drawn: bool = False

    @property
    def workload(self) -> Workload:
        """What memory is predicted for."""
        accelerator = self.cluster.kind.accelerator
        return self.load.memory_workload(self.memory_tokens, accelerator=accelerator, drawn=self.drawn)


@dataclass(frozen=True)
class Candidate:
    """A plan that fits memory, with its predicted step latency in seconds."""

    plan: Plan
    latency_s: float


class NoPlanError(ValueError):
    """No plan of a policy runs on the devices there are; the message says why."""


class Planning(Protocol):
    """What the controller asks of planner, cost model and transition prices."""

    def search(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan | None) -> Sequence[Candidate]:
        """Return the best plan and its runners-up, fastest first; none when nothing fits."""
        ...

    def scale(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan) -> Sequence[Candidate]:
        """Return plans with the current tp and pp and any dp, fastest first; none when nothing fits."""
        ...

    def refit(self, boundary: Boundary, efficiencies: Efficiencies, plan: Plan) -> Candidate | None:
        """Return the plan with micro-batch and recomputation picked anew; None when no choice fits."""
        ...

    def fits(self, boundary: Boundary, plan: Plan) -> bool:
        """Return whether memory takes a plan as it is, micro-batches and recomputation included."""
        ...

    def price(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan, target: Plan) -> TransitionPrice:
        """Return what the move from one plan to another costs."""
        ...


@dataclass
class Decision:
    """One replan: what was weighed, the verdict, and afterwards what was measured. Latencies are of one step.

    `plan` is the one to run next; it is the candidate's when it was admitted or urgent.
    """

    step: int
    trigger: tuple[str, ...]
    current: Plan
    candidate: Plan
    plan: Plan
    latency_current_s: float | None
    latency_candidate_s: float
    price: TransitionPrice
    horizon_steps: float
    payback_steps: float
    verdict: Verdict
    reason: str
    measured: dict[str, float] = field(default_factory=dict)

    @property
    def moves(self) -> bool:
        """Whether state has to move before the next step."""
        return self.verdict in ("admit", "urgent") and moves_state(self.current, self.plan)

    @property
    def changes_layout(self) -> bool:
        return self.moves and changes_layout(self.current, self.plan)

    def to_record(self) -> dict[str, Any]:
        """Return the line of decisions.jsonl; infinite payback is null."""
        price = self.price.to_record()
        record: dict[str, Any] = {
            "step": self.step,
            "trigger": list(self.trigger),
            "current": self.current.to_record(),
            "candidate": self.candidate.to_record(),
            "latency_current_s": self.latency_current_s,
            "latency_candidate_s": self.latency_candidate_s,
            "transition_s": {"direct": price["direct"], "staged": price["staged"]},
            "horizon_steps": self.horizon_steps,
            "payback_steps": self.payback_steps if math.isfinite(self.payback_steps) else None,
            "verdict": self.verdict,
            "reason": self.reason,
        }
        return record | ({"measured": dict(self.measured)} if self.measured else {})


@dataclass(frozen=True)
class StepOutcome:
    """What an executor measured of one step.

    Attributes:
        seconds: of the step, also of one that was broken off.
        completed: false when devices were lost or memory ran out: the step is to be done again.
        response_tokens, response_tokens_p95: what the rollouts came to; None when the step broke off before.
        response_tokens_longest: of the longest response, where that is known.
        stages_s: measured seconds by task, keyed such as "actor.training/inference".
        classes_s: of them, by task, the seconds of operation classes that were measured by themselves: from one plan
            alone, seconds of whole tasks don't tell the classes apart.
        equal_work_s: by device the seconds of work that was equal on all of them; one mapping a kind of work.
        peak_bytes: measured peak by device.
        out_of_memory: devices on which an allocation failed.
    """

    step: int
    seconds: float
    completed: bool = True
    response_tokens: float | None = None
    response_tokens_p95: float | None = None
    response_tokens_longest: float | None = None
    share_at_cap: float = 0.0
    stages_s: Mapping[str, float] = field(default_factory=dict)
    classes_s: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    equal_work_s: Sequence[Mapping[int, float]] = ()
    peak_bytes: Mapping[int, float] = field(default_factory=dict)
    out_of_memory: tuple[int, ...] = ()
