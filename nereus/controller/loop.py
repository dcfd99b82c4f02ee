"""The control loop around one step: look, decide, move, run, learn. One loop for a job and for the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from nereus.cluster import Cluster
from nereus.controller.controller import Controller
from nereus.controller.decision import Boundary, Decision, NoPlanError, StepOutcome
from nereus.controller.monitor import Signals, describe_cap
from nereus.cost.calibration import Calibration
from nereus.cost.load import StepLoad
from nereus.cost.operations import Operations
from nereus.plan import Plan

# A threshold is crossed by what is known within it: so many standard deviations hold 95% of all errors.
SURE_DEVIATIONS = 2


@dataclass(frozen=True)
class Surroundings:
    """What there is at a boundary: the live devices, and those of the plan whose memory is gone."""

    cluster: Cluster
    lost: frozenset[int] = frozenset()


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


class Predictor(Protocol):
    """What learning needs of the cost model: what was predicted of what has been measured."""

    def operations(self, plan: Plan, load: StepLoad, cluster: Cluster) -> dict[str, Operations]:
        """Return the operations of a step by task."""
        ...

    def peaks(self, plan: Plan, load: StepLoad) -> dict[int, int]:
        """Return the predicted peak of each device in bytes, uncorrected."""
        ...


@dataclass
class ControlLoop:
    """One job under control.

    Attributes:
        load: the load of the next step as far as is known: that of the last one.
        cap_tokens: the length cap, for the warning about responses that sit at it.
        warnings: (step, text) of what no plan can mend.
    """

    controller: Controller
    calibration: Calibration
    executor: Executor
    predictor: Predictor
    load: StepLoad
    cap_tokens: int | None = None
    warnings: list[tuple[int, str]] = field(default_factory=list)
    _free_bytes: float | None = None
    _previous_p95: float | None = None
    _cluster: Cluster | None = None

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
        decision = self.controller.decide(self._boundary(step), self.calibration.efficiencies())
        if decision is not None and decision.moves:
            self.controller.note_transition(self.executor.apply(decision))
        outcome = self.executor.run_step(step, self.controller.plan)
        self._learn(outcome)
        return outcome

    def _boundary(self, step: int) -> Boundary:
        around = self.executor.look(step, self.controller.plan)
        self._cluster = around.cluster
        known = self._previous_p95 is not None
        efficiencies, doubt = self.calibration.efficiencies(), self.calibration.uncertainty()
        most = self.controller.settings.thresholds.efficiency
        signals = Signals(
            response_tokens=self.load.response_tokens if known else None,
            free_memory_bytes=self._free_bytes,
            efficiency=efficiencies.efficiency,
            unsure=frozenset(name for name, deviation in doubt.items() if SURE_DEVIATIONS * deviation > most),
            device_factor=efficiencies.device_factor,
        )
        return Boundary(
            step, around.cluster, self.load, self._memory_tokens(), signals, around.lost,
            memory_factor=self.calibration.memory.factor(),
        )  # fmt: skip

    def _memory_tokens(self) -> float:
        """Return the length to predict memory for: the last p95, and what it grew by once more."""
        last = self.load.response_tokens_p95
        expected = last + max(0.0, last - (self._previous_p95 or last))
        return expected if self.cap_tokens is None else min(expected, max(last, self.cap_tokens))

    def _learn(self, outcome: StepOutcome) -> None:
        assert self._cluster is not None
        plan = self.controller.plan
        if outcome.completed:
            self.controller.note_step(outcome.step, outcome.seconds)
            self._note_lengths(outcome)
        for seconds in outcome.equal_work_s:
            self.calibration.devices.observe(seconds)
        if outcome.stages_s:
            for key, operations in self.predictor.operations(plan, self.load, self._cluster).items():
                name = key.split("/")[0]
                devices = plan[name].devices if name in plan else ()
                self.calibration.observe(outcome.step, operations, outcome.stages_s.get(key, 0.0), devices)
        self._learn_memory(outcome, plan)

    def _note_lengths(self, outcome: StepOutcome) -> None:
        assert outcome.response_tokens is not None and outcome.response_tokens_p95 is not None
        self._previous_p95 = self.load.response_tokens_p95
        self.load = replace(
            self.load,
            response_tokens=outcome.response_tokens,
            response_tokens_p95=max(outcome.response_tokens, outcome.response_tokens_p95),
        )
        warning = describe_cap(outcome.share_at_cap, self.cap_tokens) if self.cap_tokens else None
        if warning is not None:
            self.warnings.append((outcome.step, warning))

    def _learn_memory(self, outcome: StepOutcome, plan: Plan) -> None:
        if not outcome.peak_bytes:
            return
        assert self._cluster is not None
        predicted = self.predictor.peaks(plan, self.load)
        # All devices say nearly the same; the fullest one is what matters, one measurement a step.
        fullest = max(outcome.peak_bytes, key=lambda device: outcome.peak_bytes[device])
        if fullest in predicted:
            self.calibration.memory.observe(predicted[fullest], outcome.peak_bytes[fullest])
        capacities = self._cluster.capacities
        free = [capacities[d] - peak for d, peak in outcome.peak_bytes.items() if d in capacities]
        self._free_bytes = float(min(free, default=0.0))
