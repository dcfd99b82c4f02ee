"""What one job's control remembers: it looks at a boundary, decides, and learns from the step that follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from nereus.cluster import Cluster
from nereus.controller.controller import Controller
from nereus.controller.decision import Boundary, Decision, NoPlanError, StepOutcome
from nereus.controller.monitor import Signals, describe_cap
from nereus.cost.calibration import Calibration
from nereus.cost.efficiency import CLASSES, Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.operations import Operations
from nereus.cost.rank_memory import Workload
from nereus.cost.step import combine_tasks
from nereus.plan import Plan

# A threshold is crossed by what is known within it: so many standard deviations hold 95% of all errors.
SURE_DEVIATIONS = 2
# A class with a smaller share of a step's seconds may change as it likes: no plan is better for it, but its noise would
# pass for drift, and shorten the horizon of all that matters.
LEAST_SHARE = 0.05


@dataclass(frozen=True)
class Surroundings:
    """What there is at a boundary: the live devices, and those of the plan whose memory is gone."""

    cluster: Cluster
    lost: frozenset[int] = frozenset()


class Predictor(Protocol):
    """What learning needs of the cost model: what was predicted of what has been measured."""

    def operations(self, plan: Plan, load: StepLoad, cluster: Cluster) -> dict[str, Operations]:
        """Return the operations of a step by task."""
        ...

    def peaks(self, plan: Plan, load: StepLoad) -> dict[int, int]:
        """Return the predicted peak of each device in bytes, uncorrected."""
        ...


@dataclass
class Adaptation:
    """One job under control, between its steps.

    Attributes:
        load: the load of the next step as far as is known: that of the last one.
        cap_tokens: the length cap, for the warning about responses that sit at it.
        prompt_margin_tokens: by how much the longest prompt is longer than the mean one of `load`.
        first_memory_factor: what predicted peaks are multiplied by before one was measured; None: as is prudent.
        cluster: the devices there are, as of the last boundary.
        warnings: (step, text) of what no plan can mend.
    """

    controller: Controller
    calibration: Calibration
    predictor: Predictor
    load: StepLoad
    cap_tokens: int | None = None
    prompt_margin_tokens: float = 0.0
    first_memory_factor: float | None = None
    cluster: Cluster | None = None
    warnings: list[tuple[int, str]] = field(default_factory=list)
    _free_bytes: float | None = None
    _minor: frozenset[str] = frozenset()  # classes below LEAST_SHARE in the last step
    _previous_longest: float | None = None
    _is_free_memory_old: bool = False  # it was that of the plan before a move
    _assumed_tokens: float | None = None  # the longest response that the last decision was made for
    _assumes_drawn: bool = False  # it took the others to be as long as they were

    def decide(self, step: int, around: Surroundings) -> Decision | None:
        """Decide at the boundary before a step what it runs on; see `Controller.decide`.

        Raises:
            NoPlanError: nothing that the policy may choose runs on the devices there are.
        """
        try:
            return self._decide(step, around)
        except NoPlanError:
            if not self.calibration.memory.forgive():
                raise
        # Allocations that failed say what didn't fit, not by how much; before giving up what was measured counts alone.
        return self._decide(step, around)

    def _decide(self, step: int, around: Surroundings) -> Decision | None:
        """Decide for the lengths that are expected; where nothing fits them, for less: they are a guess."""
        failure: NoPlanError | None = None
        for tokens, drawn in self._lengths():
            self._assumed_tokens, self._assumes_drawn = tokens, drawn
            try:
                decision = self.controller.decide(self.boundary(step, around), self.calibration.efficiencies())
                self._is_free_memory_old |= decision is not None and decision.moves
                return decision
            except NoPlanError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _lengths(self) -> Sequence[tuple[float, bool]]:
        """Return the longest responses to plan for, and whether the others are as they were in the last step.

        First all are as long as the longest that is expected, then as the longest that is known. A guess is halved.
        """
        expected, last = self._expected_tokens, self.load.longest_tokens
        if self.has_learned or self.load.response_tokens_longest is not None:
            known = [(last, False), (last, True)] if self.load.response_tokens_longest is not None else [(last, False)]
            return [(expected, False), *known] if last < expected else known
        return [(expected / 2**halvings, False) for halvings in range(max(1, int(expected).bit_length()))]

    def boundary(self, step: int, around: Surroundings) -> Boundary:
        """Return a boundary as the controller sees it."""
        self.cluster = around.cluster
        known = self._previous_longest is not None
        efficiencies, doubt = self.calibration.efficiencies(), self.calibration.uncertainty()
        most = self.controller.settings.thresholds.efficiency
        signals = Signals(
            response_tokens=self.load.response_tokens if known else None,
            free_memory_bytes=None if self._is_free_memory_old else self._free_bytes,
            efficiency=efficiencies.efficiency,
            unsure=frozenset(name for name, deviation in doubt.items() if SURE_DEVIATIONS * deviation > most)
            | self._minor,
            device_factor=efficiencies.device_factor,
        )
        return Boundary(
            step, around.cluster, self.load, self.memory_tokens, signals, around.lost,
            memory_factor=self.memory_factor, drawn=self._assumes_drawn,
        )  # fmt: skip

    def workload(self, *, accelerator: bool) -> Workload:
        """Return the workload that memory is predicted for, as the last decision has it."""
        return self.load.memory_workload(self.memory_tokens, accelerator=accelerator, drawn=self._assumes_drawn)

    @property
    def memory_factor(self) -> float:
        """What predicted peaks are multiplied by."""
        if self._free_bytes is None and self.first_memory_factor is not None:
            return self.first_memory_factor
        return self.calibration.memory.factor()

    @property
    def memory_tokens(self) -> float:
        """The response length to predict memory for, with what the longest prompt has above the mean one."""
        tokens = self._expected_tokens if self._assumed_tokens is None else self._assumed_tokens
        return tokens + self.prompt_margin_tokens

    @property
    def _expected_tokens(self) -> float:
        """The longest response of the last step, and what it grew by once more."""
        last = self.load.longest_tokens
        expected = last + max(0.0, last - (self._previous_longest or last))
        return expected if self.cap_tokens is None else min(expected, max(last, self.cap_tokens))

    @property
    def has_learned(self) -> bool:
        """Whether a step has been measured."""
        return self._previous_longest is not None

    def learn(self, outcome: StepOutcome) -> None:
        """Take in what a step came to; one that was broken off says what its memory was, and little else."""
        assert self.cluster is not None
        plan, load, self._assumed_tokens = self.controller.plan, self.load_of(outcome), None
        self._assumes_drawn = False
        if outcome.completed:
            self.controller.note_step(outcome.step, outcome.seconds)
            self._previous_longest, self.load = self.load.longest_tokens, load
            self._warn_of_cap(outcome)
        for equal in outcome.equal_work_s:
            self.calibration.devices.observe(equal)
        if outcome.stages_s:
            tasks = self.predictor.operations(plan, load, self.cluster)
            for key, operations in tasks.items():
                name = key.split("/")[0]
                devices = plan[name].devices if name in plan else ()
                seconds, classes_s = outcome.stages_s.get(key, 0.0), outcome.classes_s.get(key, {})
                for one, spent in classes_s.items():
                    self.calibration.observe(outcome.step, operations.only([one]), spent, devices)
                rest_s = seconds - sum(classes_s.values())
                self.calibration.observe(outcome.step, operations.without(classes_s), rest_s, devices)
            if outcome.completed:
                efficiencies, tasks_s = self.calibration.efficiencies(), dict(outcome.stages_s)
                if "staging" in tasks:  # where it wasn't measured it counts as it is predicted: else it would twice
                    tasks_s.setdefault("staging", float(tasks["staging"].total_s(efficiencies)))
                self.calibration.observe_rest(outcome.seconds - sum(combine_tasks(plan, tasks_s).values()))
                self._minor = find_minor(tasks.values(), efficiencies)
        self._learn_memory(outcome, plan, load)

    def predict_peaks(self, outcome: StepOutcome) -> dict[int, int]:
        """Return the peaks of a step in bytes by device as they were to be predicted, uncorrected."""
        return self.predictor.peaks(self.controller.plan, self.load_of(outcome))

    def load_of(self, outcome: StepOutcome) -> StepLoad:
        """Return the load that a step had; of one that was broken off early, what it was expected to have."""
        if outcome.response_tokens is None or outcome.response_tokens_p95 is None:
            return self.load
        return replace(
            self.load,
            response_tokens=outcome.response_tokens,
            response_tokens_p95=max(outcome.response_tokens, outcome.response_tokens_p95),
            response_tokens_longest=outcome.response_tokens_longest,
        )

    def _warn_of_cap(self, outcome: StepOutcome) -> None:
        warning = describe_cap(outcome.share_at_cap, self.cap_tokens) if self.cap_tokens else None
        if warning is not None:
            self.warnings.append((outcome.step, warning))

    def _learn_memory(self, outcome: StepOutcome, plan: Plan, load: StepLoad) -> None:
        if not outcome.peak_bytes:
            return
        assert self.cluster is not None
        predicted = self.predictor.peaks(plan, load)
        # All devices say nearly the same; the fullest one is what matters, one measurement a step.
        fullest = max(outcome.peak_bytes, key=lambda device: outcome.peak_bytes[device])
        if fullest in predicted:
            memory = self.calibration.memory
            learn = memory.observe_lack if outcome.out_of_memory else memory.observe
            learn(predicted[fullest], outcome.peak_bytes[fullest])
        capacities = self.cluster.capacities
        free = [capacities[d] - peak for d, peak in outcome.peak_bytes.items() if d in capacities]
        self._free_bytes, self._is_free_memory_old = float(min(free, default=0.0)), False

    def to_record(self) -> dict[str, Any]:
        """Return what staged state keeps of it."""
        return {
            "controller": self.controller.to_record(),
            "calibration": self.calibration.to_record(),
            "response_tokens": self.load.response_tokens,
            "response_tokens_p95": self.load.response_tokens_p95,
            "response_tokens_longest": self.load.response_tokens_longest,
            "previous_longest": self._previous_longest,
            "free_bytes": self._free_bytes,
            "minor": sorted(self._minor),
        }

    def go_on_from(self, record: Mapping[str, Any]) -> None:
        """Remember the lengths and the free memory that a record keeps; the rest is made from it by its own classes."""
        self.load = replace(
            self.load,
            response_tokens=record["response_tokens"],
            response_tokens_p95=record["response_tokens_p95"],
            response_tokens_longest=record["response_tokens_longest"],
        )
        self._previous_longest, self._free_bytes = record["previous_longest"], record["free_bytes"]
        self._minor = frozenset(record.get("minor", ()))


def find_minor(tasks: Iterable[Operations], efficiencies: Efficiencies) -> frozenset[str]:
    """Return the classes that take less than `LEAST_SHARE` of the seconds of some tasks; of no tasks, none."""
    spent: dict[str, float] = {}
    for operations in tasks:
        for name, seconds in operations.seconds(efficiencies).items():
            spent[name] = spent.get(name, 0.0) + float(seconds)
    total_s = sum(spent.values())
    return frozenset(name for name in CLASSES if spent.get(name, 0.0) < LEAST_SHARE * total_s)
