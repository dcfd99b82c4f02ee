"""The controller: at every boundary it finds what drifted, plans anew if it must, and admits what pays.

It is told what an executor measured and says what to run; it has no clock and does no I/O, so the same code drives a
job and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus.controller.admission import ADMIT, Option, payback_steps, pick_urgent
from nereus.controller.decision import Boundary, Candidate, Decision, NoPlanError, Planning
from nereus.controller.monitor import FREE_MEMORY, LOST, MEMORY_VIOLATION, POOL, SCHEDULE, Monitor, Thresholds
from nereus.controller.prices import MovePrices
from nereus.controller.reasons import explain
from nereus.cost.efficiency import Efficiencies
from nereus.plan import Plan, stage_of
from nereus.transition.price import FREE, TransitionPrice, moves_state


@dataclass(frozen=True)
class Settings:
    """How the controller adapts; `policy` is one of payback, any_gain, every_k, fixed.

    With `enabled` false the plan never changes but for micro-batches and recomputation; lost devices end the run.
    `gamma` is the share of the horizon within which a move must pay back; `every` the k of every_k in steps.
    `may_change_layouts`: `fixed` gives its tp and pp up where no plan that has them fits, and keeps those that it then
    gets; else it ends there, as the simulator counts it.
    """

    policy: str = "payback"
    gamma: float = 0.5
    every: int = 3
    thresholds: Thresholds = field(default_factory=Thresholds)
    enabled: bool = True
    may_change_layouts: bool = False

    def __post_init__(self) -> None:
        if self.policy not in ADMIT:
            raise ValueError(f"adapt.policy is {self.policy!r}; choose one of {', '.join(ADMIT)}.")
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"adapt.gamma is {self.gamma}; choose a share of the horizon in [0, 1].")


def keep_settings(plan: Plan, refitted: Plan) -> Plan:
    """Return a refitted plan with the micro-batches and recomputation with which model-stages are trained so far.

    Sequences in flight of generation are no setting: they fill the memory that there is, and shrink with every token.
    """
    for name, stage in plan.items():
        if stage_of(name) == "training":
            refitted = refitted.with_stage(name, micro_batch=stage.micro_batch, recompute=stage.recompute)
    return refitted


class Controller:
    """The plan in force, the monitor's references, and the decisions so far."""

    def __init__(
        self,
        plan: Plan,
        planning: Planning,
        settings: Settings,
        monitor: Monitor | None = None,
        prices: MovePrices | None = None,
    ) -> None:
        self.plan = plan
        self.settings = settings
        self.decisions: list[Decision] = []
        self._planning = planning
        self._monitor = monitor or Monitor(settings.thresholds)
        self._prices = prices or MovePrices()
        self._price_s = 0.0  # of the last decision's move, uncorrected
        self._fitted: Plan | None = None  # what the last boundary has made of the plan

    def decide(self, boundary: Boundary, efficiencies: Efficiencies) -> Decision | None:
        """Set `plan` to what the next step runs and return the record of the replan, if there was one.

        Without a replan only micro-batch and recomputation are picked anew.

        Raises:
            NoPlanError: nothing this policy may choose runs on the devices there are.
        """
        before = self._monitor.to_record()
        try:
            decision = self._decide(boundary, efficiencies)
        except NoPlanError:  # asked again, for shorter responses perhaps, it sees what it has seen now
            self._monitor = Monitor.from_record(before, self.settings.thresholds)
            raise
        self._fitted = self.plan
        return decision

    def _decide(self, boundary: Boundary, efficiencies: Efficiencies) -> Decision | None:
        triggers = self._monitor.find_triggers(boundary.step, boundary.signals, boundary.cluster.device_ids)
        there = set(self.plan.devices) <= set(boundary.cluster.device_ids) - boundary.lost
        refitted = self._planning.refit(boundary, efficiencies, self.plan) if there else None
        if not self.settings.enabled:
            self._stay(boundary, refitted)
            return None
        if refitted is None:
            away = not set(self.plan.devices) <= set(boundary.cluster.device_ids)
            cause = MEMORY_VIOLATION if there else POOL if away else LOST
            triggers = self._add_trigger(cause, triggers, boundary.step)
            return self._replan(boundary, efficiencies, triggers, None)
        # Where a step has chosen its settings anew, for lengths that it had drawn, they say nothing of this one.
        settled = self.plan if self._fitted is None or moves_state(self._fitted, self.plan) else self._fitted
        as_it_was = keep_settings(settled, refitted.plan)
        if as_it_was != refitted.plan and not self._planning.fits(boundary, as_it_was):
            triggers = self._add_trigger(MEMORY_VIOLATION, triggers, boundary.step)
        triggers = self._opportunities(boundary.step, triggers)
        if not triggers:
            self.plan = refitted.plan
            return None
        return self._replan(boundary, efficiencies, triggers, refitted)

    def _add_trigger(self, cause: str, triggers: tuple[str, ...], step: int) -> tuple[str, ...]:
        """Return the triggers with one that is no signal of the monitor's; it crosses now."""
        if cause in triggers:
            return triggers
        self._monitor.note_crossing(cause, step)
        return (*triggers, cause)

    def note_transition(self, seconds: float) -> None:
        """Add what the transition of the last decision really took to its record, and learn from it."""
        self.decisions[-1].measured["transition_s"] = seconds
        self._prices.observe(self._price_s, seconds)

    def note_step(self, step: int, seconds: float) -> None:
        """Add what the first step after the last decision really took to its record."""
        if self.decisions and self.decisions[-1].step == step:
            self.decisions[-1].measured.setdefault("latency_s", seconds)

    def _stay(self, boundary: Boundary, refitted: Candidate | None) -> None:
        if refitted is None:
            raise NoPlanError(
                f"The plan can't go on at step {boundary.step} with {len(boundary.cluster.devices)} devices, and "
                "adapt.enabled is false; resume with more devices or memory, or let it adapt."
            )
        self.plan = refitted.plan

    def _opportunities(self, step: int, triggers: tuple[str, ...]) -> tuple[str, ...]:
        """Return the triggers that this policy follows while its plan runs on."""
        if self.settings.policy == "every_k":
            return (SCHEDULE,) if step and step % self.settings.every == 0 else ()
        if self.settings.policy == "fixed":
            return tuple(name for name in triggers if name == POOL)
        return triggers

    def _replan(
        self, boundary: Boundary, efficiencies: Efficiencies, triggers: tuple[str, ...], current: Candidate | None
    ) -> Decision:
        """Weigh the best plans against the current one (None: it can't run) and record the verdict."""
        candidates = self._candidates(boundary, efficiencies, is_urgent=current is None)
        if not candidates and current is not None:  # a plan made by hand may be none that a search comes to
            candidates = [current]
        if not candidates:
            is_bound = self.settings.policy == "fixed" and not self.settings.may_change_layouts
            raise NoPlanError(
                f"No plan {'of the first tp and pp ' if is_bound else ''}fits the "
                f"{len(boundary.cluster.devices)} devices at step {boundary.step}; use more devices or more memory."
            )
        self._monitor.reset_references(boundary.signals)
        horizon = self._monitor.horizon(triggers)
        predicted = [self._planning.price(boundary, efficiencies, self.plan, c.plan) for c in candidates]
        prices = [self._prices.correct(price) if price.seconds else price for price in predicted]
        options = [Option(c.latency_s, price.seconds) for c, price in zip(candidates, prices, strict=True)]
        gamma = self.settings.gamma
        chosen: int | None
        if current is None:
            chosen = pick_urgent(options, gamma=gamma, horizon=horizon)
        elif not moves_state(current.plan, candidates[0].plan):
            chosen = None
        else:
            chosen = ADMIT[self.settings.policy](current.latency_s, options, gamma=gamma, horizon=horizon)
        shown = chosen or 0
        decision = self._record(
            boundary, triggers, current, candidates[shown], prices[shown], horizon, admitted=chosen is not None
        )
        self.decisions.append(decision)
        self._price_s = predicted[shown].seconds
        self.plan = decision.plan
        if decision.moves:
            self._monitor.forget(FREE_MEMORY)
        return decision

    def _candidates(self, boundary: Boundary, efficiencies: Efficiencies, *, is_urgent: bool) -> list[Candidate]:
        """Return the plans to weigh, fastest first, each placement once."""
        found: list[Candidate] = list(self._planning.scale(boundary, efficiencies, self.plan))
        if self.settings.policy != "fixed" or (is_urgent and not found and self.settings.may_change_layouts):
            found += self._planning.search(boundary, efficiencies, self.plan)
        found.sort(key=lambda candidate: candidate.latency_s)
        distinct: list[Candidate] = []
        for candidate in found:
            if all(moves_state(candidate.plan, other.plan) for other in distinct):
                distinct.append(candidate)
        return distinct

    def _record(
        self,
        boundary: Boundary,
        triggers: Sequence[str],
        current: Candidate | None,
        candidate: Candidate,
        price: TransitionPrice,
        horizon: float,
        *,
        admitted: bool,
    ) -> Decision:
        option = Option(candidate.latency_s, price.seconds)
        decision = Decision(
            step=boundary.step,
            trigger=tuple(triggers),
            current=self.plan if current is None else current.plan,
            candidate=candidate.plan,
            plan=candidate.plan,
            latency_current_s=None if current is None else current.latency_s,
            latency_candidate_s=candidate.latency_s,
            price=price,
            horizon_steps=horizon,
            payback_steps=0.0 if current is None else payback_steps(current.latency_s, option),
            verdict="urgent" if current is None else "admit" if admitted else "refuse",
            reason="",
        )
        if current is not None and not admitted:
            decision.plan = current.plan
            if not moves_state(current.plan, candidate.plan):
                decision.verdict, decision.price, decision.payback_steps = "keep", FREE, math.inf
        decision.reason = explain(decision, self.settings.policy, self.settings.gamma)
        return decision

    def to_record(self) -> dict[str, Any]:
        """Return what staged state keeps: the plan in force, the monitor's references and what moves have taken."""
        return {
            "plan": self.plan.to_record(),
            "monitor": self._monitor.to_record(),
            "move_prices": self._prices.to_record(),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any], planning: Planning, settings: Settings) -> Controller:
        monitor = Monitor.from_record(record["monitor"], settings.thresholds)
        prices = MovePrices(record.get("move_prices", ()))
        return cls(Plan.from_record(record["plan"]), planning, settings, monitor, prices)
