"""The steps of PPO under control: each boundary looks at devices, lengths and memory, and decides what comes next.

decide -> transition where state has to move -> the step -> learn
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nereus.alarms import Alarms
from nereus.commits import read_commit
from nereus.controller.adaptation import Adaptation, Surroundings
from nereus.controller.decision import Boundary, Candidate, Decision, NoPlanError, StepOutcome
from nereus.cost.load import StepLoad
from nereus.cost.memory import Workload
from nereus.emu import emus_of
from nereus.plan import Plan, stage_of
from nereus.planner import plan_auto
from nereus.ppo.metrics import compute_response_metrics
from nereus.resume import next_step
from nereus.runtime.devices_there import Deadlines, DevicesThere, out_of_time
from nereus.runtime.elastic_steps import MOST_ATTEMPTS, ElasticSteps
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.frame import Frame, corrected, first_plan
from nereus.runtime.opening import OpenRun
from nereus.runtime.probe import measure_machine, remove_leftovers
from nereus.runtime.rollouts import Rollouts
from nereus.supply import Supply
from nereus.transition.graph import InfeasibleTransition
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import TransitionGraph
from storage.manifest import Manifest

logger = logging.getLogger(__name__)

# A device of which less than this is left before its deadline is given up for what it holds.
LEAST_NOTICE_S = 1.0


class MemoryShort(RuntimeError):
    """The responses of this step need more memory than the plan has, whatever its micro-batches."""


class NoDevices(RuntimeError):
    """The run can't go on with the devices there are; it ends, and can be resumed."""


class AdaptiveSteps(ElasticSteps):
    """PPO steps whose plan follows the devices, the lengths of the responses, memory and speed."""

    def __init__(self, run: OpenRun, engine: Engine, *, owns_engine: bool) -> None:
        super().__init__(run, engine, owns_engine=owns_engine)
        self._adaptation: Adaptation | None = None
        self._frame: Frame = self.job.frame
        self._initial: Plan | None = None
        self._devices: DevicesThere | None = None
        self._deadlines = Deadlines(run.run_dir.url, engine, lambda: self.plan.devices)
        self._decided: list[Decision] = []  # at the step that is about to begin
        self._to_journal: list[dict[str, Any]] = []  # decisions that no commit has told of, as they turned out
        self._alarms = Alarms(cap_tokens=self._frame.cap_tokens, precision=self.config.precision)

    @property
    def adapts(self) -> bool:
        """Whether the plan may change without a schedule that says so."""
        return self.config.adapt.enabled and not isinstance(self.config.plan, tuple)

    # The beginning

    def _begin_control(self) -> None:
        """Find out what there is, start its workers, and choose the plan to begin or to go on with."""
        record, first = self._recorded_control(), next_step(self._opened.commits or ())
        if record is not None:
            cap, precision = self._frame.cap_tokens, self.config.precision
            self._alarms = Alarms.from_record(record["alarms"], cap_tokens=cap, precision=precision)
        total, trace = self.config.cluster.devices, self.job.device_trace
        self._devices = DevicesThere(self._opened.run_dir.url, total, trace, record and record["supply"])
        if not self._opened.is_new:
            self._devices.begin_again(first)
        supply = self._look(first)
        if self._owns_engine:
            self._engine.start(supply.present if self.adapts else self.plan.devices)
        if self.adapts:
            self._measure_machine(supply)
            self._begin_adapting(record, supply)
            if self._owns_engine:  # what was measured with leaves its memory behind
                self._engine.release(supply.present)
                remove_leftovers(self._opened.staging_root)
                self._engine.start(self.plan.devices)
        else:
            self._check_devices(supply)

    def _measure_machine(self, supply: Supply) -> None:
        """Put what this machine reaches in place of the nominal rates, as far as its memory lets it be measured."""
        devices, kind = supply.present, self.config.cluster.device
        try:
            machine = measure_machine(
                self._engine,
                devices,
                self._measure(devices),
                device_type=kind,
                precision=self.config.precision,
                memory_bytes=self._frame.cluster.kind.memory_bytes,
            )
        except CommandError as error:
            logger.warning("This machine could not be measured (%s); nominal rates stand in for its own.", error)
            self._engine.recover()
            return
        self._frame = self._frame.with_kind(replace(machine, accelerator=self._frame.cluster.kind.accelerator))

    def _begin_adapting(self, record: Mapping[str, Any] | None, supply: Supply) -> None:
        if record is None or "controller" not in record:
            plan = self._initial = self._plan_to_begin_with(supply)
            self._adaptation = self._frame.begin(plan, self.config)
        else:
            self._adaptation = self._frame.go_on(record, self.config)
            self._initial = Plan.from_record(record["initial"])
            plan = self._adaptation.controller.plan
            if self._opened.plan_is_new and self.config.plan != "auto":
                plan = self._plan_to_begin_with(supply)
            elif not self._may_go_on(plan, supply):
                plan = self._find_first_plan(supply)
            self._adaptation.controller.plan = plan
        self.plan = self._wanted = plan
        self._deadlines.start()

    def _may_go_on(self, plan: Plan, supply: Supply) -> bool:
        """Return whether a run can go on with the plan that it had: the devices are there, and memory takes it."""
        assert self._adaptation is not None
        if not set(plan.devices) <= set(supply.present):
            return False
        return self._refit(next_step(self._opened.commits or ()), self._adaptation.load, plan) is not None

    def _plan_to_begin_with(self, supply: Supply) -> Plan:
        if self.config.plan != "auto" and set(self.plan.devices) <= set(supply.present):
            return self.plan
        return self._find_first_plan(supply)

    def _find_first_plan(self, supply: Supply) -> Plan:
        plan = first_plan(self._frame, supply.present, may_grow=True)
        if plan is None:
            raise NoDevices(f"No plan fits the devices that are there ({supply.reason}){self._describe_lack(supply)}")
        return plan

    def _recorded_control(self) -> dict[str, Any] | None:
        """Return what the newest commit keeps of control; None for a new run, or where it can't be read."""
        if not self._opened.commits:
            return None
        try:
            manifest = read_commit(self._opened.staging_root, self._opened.commits[-1])
        except (OSError, ValueError):
            return None  # restoring falls back to the commit before, and says so
        return manifest.run_state.get("control")

    def _run_state(self, step: int) -> dict[str, Any]:
        state = super()._run_state(step)
        if self._devices is None:
            return state
        control: dict[str, Any] = {"supply": self._devices.to_record(), "alarms": self._alarms.to_record()}
        if self._adaptation is not None:
            assert self._initial is not None
            control |= {**self._adaptation.to_record(), "initial": self._initial.to_record()}
        return {**state, "control": control}

    def _notes(self) -> dict[str, Any]:
        newest = None if self._staging is None else self._staging.newest
        if newest is not None:
            self._to_journal = [record for record in self._to_journal if record["step"] > newest.step]
        return {**super()._notes(), **({"decisions": list(self._to_journal)} if self._to_journal else {})}

    # At a boundary

    def _look(self, step: int) -> Supply:
        """Return the devices there are at a boundary."""
        assert self._devices is not None
        supply = self._devices.look(step, self._engine)
        if not supply.present:
            raise NoDevices(f"There are no devices from step {step} on ({supply.reason}).")
        return supply

    def decide(self, step: int) -> dict[str, Any] | None:
        """Look, and choose the plan for a step; return the record of the decision where there was one to take.

        Raises:
            NoDevices: the run can't go on with the devices there are.
        """
        if self._devices is None:
            return None
        self._decided = [decision for decision in self._decided if decision.step == step]  # the run may have gone back
        supply = self._look(step)
        if self._adaptation is None:
            self._check_devices(supply)
            return None
        cluster = self._frame.cluster.only(supply.present)
        self._lost |= out_of_time(supply, self.plan.devices, LEAST_NOTICE_S)
        self._adaptation.controller.plan = self.plan
        try:
            decision = self._adaptation.decide(step, Surroundings(cluster, self._lost))
        except NoPlanError as error:
            raise NoDevices(f"{str(error).rstrip('.')} ({supply.reason}){self._describe_lack(supply)}") from error
        if decision is None:
            return None
        late = out_of_time(supply, self.plan.devices, LEAST_NOTICE_S + 2 * decision.price.seconds)
        if decision.moves and late - self._lost:
            self._stage_now(step)
            self._lost |= late
        self._decided.append(decision)
        self._write_decisions(step)
        logger.info("step %d: %s", step, decision.reason)
        return decision.to_record()

    def _describe_lack(self, supply: Supply) -> str:
        """Return how much memory is missing on the devices that are there, to be put behind a sentence."""
        if self._adaptation is None:  # nothing is known of lengths: not even responses of one token fit
            factor, load = 1.0, self._frame.spec.load
            workload = load.memory_workload(1.0, accelerator=self._frame.cluster.kind.accelerator)
        else:
            factor, workload = self._adaptation.memory_factor, self._workload()
        capacities = corrected({device: self.job.capacities[device] for device in supply.present}, factor)
        try:
            plan_auto(self.job.specs, capacities, workload, self.config.precision)
        except ValueError as error:
            scale = f" Peaks were {factor:.2f} times what is predicted; these bytes are divided by that."
            return f": the {str(error)[0].lower()}{str(error)[1:]}{scale if round(factor, 2) != 1 else ''}"
        return "."

    def _stage_now(self, step: int) -> None:
        """Have the state of this boundary committed: there is no time to copy it from a device that goes."""
        assert self._staging is not None
        self._staging.wait()
        newest = self._staging.newest
        if step and self._has_state and (newest is None or newest.step != step - 1):
            self._begin_commit(step - 1)
            self._staging.wait()

    def _check_devices(self, supply: Supply) -> None:
        missing = sorted(set(self.plan.devices) - set(supply.present))
        if missing:
            raise NoDevices(
                f"Device {missing[0]} of the plan is gone ({supply.reason}), and the plan may not change "
                "(adapt.enabled is false, or a schedule says what it is)."
            )

    def _write_decisions(self, step: int) -> None:
        """Bring the step's lines of decisions.jsonl up to date."""
        records = [decision.to_record() for decision in self._decided if decision.step == step]
        self._records.replace_decisions(step, records, self._opened.owner.check)

    def _due(self) -> Plan:
        return super()._due() if self._adaptation is None else self._adaptation.controller.plan

    def transition_due(self, step: int) -> bool:
        """Return whether state has to move before a step, or communicators have to be made anew."""
        due = self._due()
        if self.is_whole:
            if self._adaptation is None:
                return super().transition_due(step)
            if emus_of(due) == emus_of(self.plan):
                self._take_settings(due)
                return False
        tries = self._attempts.get(due, []).count(step)
        if tries >= 2 * MOST_ATTEMPTS:
            raise CommandError(
                f"the move to the plan for step {step} failed {tries} times", label="transition", step=step
            )
        may_stay = bool(self._decided) and self._decided[-1].verdict == "admit" and self.is_whole
        if tries >= MOST_ATTEMPTS and may_stay:
            self._keep_plan(step)
            return False
        return True

    def _keep_plan(self, step: int) -> None:
        """Go on with the plan in force: a better one couldn't be reached."""
        assert self._adaptation is not None
        logger.warning("step %d: no move to a better plan has come to its end; the job stays on the one it has.", step)
        self._adaptation.controller.plan = self.plan

    # The move

    def _transition_memory(self) -> TransitionMemory:
        """Return what a move may use, under the load and the correction of memory that are known now."""
        if self._adaptation is None:
            return super()._transition_memory()
        capacities = corrected(self.job.capacities, self._adaptation.memory_factor)
        return TransitionMemory.of(self.job.specs, self._workload(), self.config.precision, capacities)

    def _workload(self) -> Workload:
        """Return the workload that memory is predicted for now."""
        assert self._adaptation is not None
        return self._adaptation.workload(accelerator=self._frame.cluster.kind.accelerator)

    def _plan_move(self, step: int, target: Plan) -> tuple[TransitionGraph, tuple[str, Manifest] | None]:
        if not self._has_state:
            raise InfeasibleTransition("the step that was broken off had begun to change what is trained")
        if self._attempts[target].count(step) > MOST_ATTEMPTS:
            self._lost = frozenset(self.plan.devices)  # what can't be moved is built again from the last commit
            raise InfeasibleTransition("no move to this plan has come to its end")
        return super()._plan_move(step, target)

    @property
    def _has_state(self) -> bool:
        """Whether workers hold the state of the boundary, or may: some of it is on a device that wasn't lost."""
        return not (self._is_given_up or set(self.plan.devices) <= self._lost)

    def run_transition(self, submit: Any = None) -> dict[str, Any]:
        """Carry the begun transition out, or back; return its line of transitions.jsonl."""
        line = super().run_transition(submit)
        if self._adaptation is not None:
            if self._decided and line["outcome"] == "committed":
                self._adaptation.controller.note_transition(line["seconds"])
                self._write_decisions(self._decided[-1].step)
            elif self._decided and line.get("in_force") == "to":
                self._note_rebuilt(line["seconds"])
            self._adaptation.controller.plan = self.plan
        return line

    def _note_rebuilt(self, seconds: float) -> None:
        """Tell of decisions that were carried out from the last commit: they hold from the step that it ends before."""
        self._decided[-1].measured["transition_s"] = seconds  # no price to learn from: it was no move
        for decision in self._decided:
            decision.step = min(decision.step, self.next_step)
        self._write_decisions(self.next_step)

    def _journal_transition(self, body: dict[str, Any]) -> None:
        super()._journal_transition({**body, **({"decision": self._decided[-1].to_record()} if self._decided else {})})

    # The step

    def generate(self, step: int) -> dict[str, Any]:
        """Draw the step's rollouts; then the lengths are known, and with them the memory that the rest of it takes."""
        record = super().generate(step)
        if self._adaptation is not None:
            self._fit_to_lengths(step)
        return record

    def _fit_to_lengths(self, step: int) -> None:
        """Choose micro-batches and recomputation for the lengths that were drawn.

        Raises:
            MemoryShort: none of them fits; the load is known now, so a plan that does can be found.
        """
        assert self._adaptation is not None
        load = replace(self._adaptation.load, **drawn_lengths(self.rollouts))
        found = self._refit(step, load, self.plan)
        if found is None:
            self._adaptation.load = load
            raise MemoryShort(
                f"step {step}: responses of up to {load.longest_tokens:.0f} tokens fit the plan with no micro-batch"
            )
        for name, stage in found.plan.items():
            if stage_of(name) != "generation":
                self.plan = self.plan.with_stage(name, micro_batch=stage.micro_batch, recompute=stage.recompute)

    def _learn(self, outcome: StepOutcome, metrics: dict[str, Any]) -> None:
        """Take in what a step came to, and add to its metrics what only control knows."""
        metrics["warnings"] = self._alarms.look(metrics)
        for warning in metrics["warnings"]:
            logger.info("step %d: %s", outcome.step, warning)  # who watches is told with the metrics
        if self._devices is not None:
            metrics["devices_present"] = list(self._devices.present)
        if self._adaptation is None:
            return
        self._adaptation.controller.plan = self.plan
        if self._adaptation.has_learned:  # before that nominal rates speak, not a calibrated model
            metrics["predicted_s"] = self._predict_both(outcome)
        self._adaptation.learn(outcome)
        if self._decided:
            self._write_decisions(outcome.step)
            # A step that is done again, after the run went back, is told of once.
            earlier = [record for record in self._to_journal if record["step"] < outcome.step]
            self._to_journal = [*earlier, *(decision.to_record() for decision in self._decided)]
            self._decided.clear()

    def _predict_both(self, outcome: StepOutcome) -> dict[str, float | None]:
        """Return what a step of such lengths takes on the plan in force and on the first one; None if it doesn't fit.

        What the step itself has taken isn't known to the model yet.
        """
        current = initial = self._predict(outcome, self.plan)
        if self._initial is None or emus_of(self._initial) != emus_of(self.plan):  # else its settings are picked anew
            initial = self._predict(outcome, self._initial)
        return {"current": current, "initial": initial}

    def _predict(self, outcome: StepOutcome, plan: Plan | None) -> float | None:
        assert self._adaptation is not None
        if plan is None or not set(plan.devices) <= set(self._frame.cluster.device_ids):
            return None  # a resumed run may have fewer devices than it began with
        found = self._refit(outcome.step, self._adaptation.load_of(outcome), plan)
        return None if found is None else found.latency_s

    def _refit(self, step: int, load: StepLoad, plan: Plan) -> Candidate | None:
        """Return a plan with the micro-batches and recomputation that suit a load whose lengths are known."""
        assert self._adaptation is not None
        length = load.longest_tokens + self._frame.prompt_margin_tokens
        factor = self._adaptation.memory_factor
        boundary = Boundary(step, self._frame.cluster, load, length, memory_factor=factor, drawn=True)
        return self._frame.planning.refit(boundary, self._adaptation.calibration.efficiencies(), plan)


def drawn_lengths(rollouts: Rollouts) -> dict[str, Any]:
    """Return what the cost model knows responses by: their mean, the 95th percentile and the longest."""
    lengths = rollouts.response_lengths
    longest = max(lengths)
    metrics = compute_response_metrics(lengths, longest)
    mean = metrics["response_tokens_mean"]
    return {
        "response_tokens": mean,
        "response_tokens_p95": max(mean, metrics["response_tokens_p95"]),
        "response_tokens_longest": float(longest),
    }
