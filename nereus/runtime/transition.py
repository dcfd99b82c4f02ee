"""One change of the plan between two steps, all or nothing: prepare, move, verify, commit, free; or back.

sum up the old units, connect -> primitives -> sum up the new units -> journal record -> new units in force -> free
                 any failure up to the record: undo -> old units in force
                 what can't be undone: `GoBack`, and the run is built again from its last commit
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus.emu import Emu, emus_of
from nereus.plan import Plan
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.job import Job
from nereus.runtime.model_stages import build_order, next_epoch
from nereus.runtime.rank_state import Counters
from nereus.runtime.shard_queue import tried
from nereus.runtime.transition_orders import TransitionOrder, UnitKey
from nereus.runtime.transition_sets import TransitionSets
from nereus.transition.durations import durations
from nereus.transition.execute import execute
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.speeds import Speeds
from nereus.transition.undo import plan_undo
from nereus.transition.verify import StateDiffers, combine
from storage.journal import FencedOff

logger = logging.getLogger(__name__)

Submit = Callable[[Primitive, Sequence[Any]], Any]


class GoBack(RuntimeError):
    """State is gone that a way back would need: the run goes on from its last commit. `plan` is the one to build.

    Attributes:
        plan: the old plan, or the new one where that was committed already.
        reason: of the failure.
    """

    def __init__(self, plan: Plan, reason: str) -> None:
        super().__init__(reason)
        self.plan = plan
        self.reason = reason


@dataclass(frozen=True)
class Boundary:
    """What holds between two steps: the plan in force before `step`, and what its model-stages count."""

    step: int
    plan: Plan
    counters: Mapping[str, Counters]
    policy_version: int


@dataclass
class Progress:
    """How far the primitives of a graph are, and what they came to."""

    started: dict[str, threading.Event] = field(default_factory=dict)
    ended: dict[str, dict[str, Any]] = field(default_factory=dict)
    under_way: set[str] = field(default_factory=set)


class Transition:
    """Moves a job from the plan in force to another one."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        graph: TransitionGraph,
        boundary: Boundary,
        sets: TransitionSets,
        *,
        memory: TransitionMemory,
        speeds: Speeds | None,
        write_record: Callable[[dict[str, Any]], None],
        failure: Exception | None = None,
        began_s: float | None = None,
        reconnect: bool = False,
    ) -> None:
        """Describe the attempt; nothing happens before `run`.

        Args:
            graph: from the plan in force. Where devices are lost there is no way back.
            sets: what is staged, or on its way, or can be.
            speeds: for predictions; None: there are none.
            write_record: appends the transition's record to the run's journal.
            failure: what has failed already before anything could move.
            began_s: `time.perf_counter()` when the attempt began, with the start of new workers; None: now.
            reconnect: whether units that stay need new links as well: a command that used the old ones was broken off.
        """
        self.graph, self.boundary = graph, boundary
        self.predicted_s = {} if speeds is None else durations(graph, memory, speeds)
        self._engine, self._job, self._sets, self._memory = engine, job, sets, memory
        self._write_record, self._failure = write_record, failure
        self._epoch = next_epoch()
        self._by_id = dict(graph.by_id)
        self._progress = Progress()
        for primitive in graph.primitives:
            self._progress.started[primitive.id] = threading.Event()
        self._devices = tuple(sorted({*graph.current.devices}.difference(graph.lost) | {*graph.target.devices}))
        self._changed = [
            name for name in graph.target if reconnect or _units(graph.target, name) != _units(graph.current, name)
        ]
        self._sums: dict[str, dict[str, int]] = {}
        self._began_s = time.perf_counter() if began_s is None else began_s
        self._is_begun = False  # workers may know of this attempt
        self.verified = False

    # What is visible as tasks

    def run_primitive(self, id: str) -> dict[str, Any]:
        """Run one primitive on all its devices; return its bytes and seconds."""
        primitive, progress = self._by_id[id], self._progress
        for stage in primitive.streams:  # it holds its devices while it reads: what writes must not wait for them
            self._sets.wait_for(progress.started[stage].wait, f"{stage} to start")
        if any(unit.stage == "training" for unit in primitive.frees):
            self._sets.wait_pending()
        progress.under_way.add(id)
        began = time.perf_counter()
        try:
            if primitive.kind == "stage":
                num_bytes = self._sets.stage(primitive, on_start=progress.started[id].set)
            else:
                progress.started[id].set()
                restore = self._sets.restore_order(primitive) if primitive.kind == "restore" else None
                arguments = {"primitive": primitive, "restore": restore}
                num_bytes = sum(self._run(id, "run_primitive", dict.fromkeys(primitive.devices, arguments)).values())
        except Exception as error:
            if primitive.kind == "stage":  # those that read along would wait for ever
                self._sets.fail(primitive, error)
                progress.started[id].set()
            raise
        progress.ended[id] = {"bytes": num_bytes, "seconds": time.perf_counter() - began}
        progress.under_way.discard(id)
        return progress.ended[id]

    # The whole

    def run(self, submit: Submit) -> dict[str, Any]:
        """Do it, or go back; return the line of transitions.jsonl.

        Args:
            submit: starts a primitive by `run_primitive` of its id, see `nereus.transition.execute.execute`.

        Raises:
            GoBack: the run has to be built again from its last commit.
            FencedOff: another driver has taken the run over.
        """
        try:
            if self._failure is not None:
                raise self._failure
            self._prepare()
            execute(self.graph, submit)
            self._verify()
            tried(lambda: self._write_record(self._journal_body("committed")))
        except FencedOff:
            raise
        except Exception as error:  # whatever it is, the job goes on
            return self._undo(error, submit)
        try:
            self._put_in_force(submit)
        except FencedOff:
            raise
        except Exception as error:
            raise GoBack(self.graph.target, f"after the commit of the new plan: {_reason(error)}") from error
        return self._line("committed")

    def _prepare(self) -> None:
        """Connect the new plan's communicators while the old ones live, and sum up what must arrive."""
        self._sums = self._sum_up(self.graph.current)
        self._connect(self.graph.target, self._changed)

    def _connect(self, plan: Plan, names: Collection[str]) -> None:
        builds = {name: build_order(self._job, plan, name, self._epoch, False) for name in plan if name in names}
        training, generation = plan["actor.training"], plan["actor.generation"]
        moves_actor = not {"actor.training", "actor.generation"}.isdisjoint(builds)
        orders = {}
        for device in self._devices:
            syncs = moves_actor and device in {*training.devices, *generation.devices}
            orders[device] = TransitionOrder(
                self._epoch,
                self._devices,
                tuple(order for name, order in builds.items() if device in plan[name].devices),
                (training, generation) if syncs else None,
            )
        self._is_begun = True
        self._run("connect", "begin_transition", {device: {"order": order} for device, order in orders.items()})

    def _sum_up(self, plan: Plan) -> dict[str, dict[str, int]]:
        """Return the logical checksums of what changes, by model-stage and tensor."""
        lost = self.graph.lost if plan is self.graph.current else frozenset()
        units = [u for u in emus_of(plan) if u.model_stage in self._changed and lost.isdisjoint(u.devices)]
        kwargs = {}
        for device in sorted({device for unit in units for device in unit.devices}):
            kwargs[device] = {"keys": [UnitKey.of(unit) for unit in units if device in unit.devices]}
        results = self._run("checksums", "sum_up", kwargs)
        return combine(results, units, self._job.specs)

    def _verify(self) -> None:
        """Raise StateDiffers unless every new unit holds exactly what the old ones held."""
        self._compare(self._sum_up(self.graph.target))
        self.verified = True

    def _compare(self, sums: Mapping[str, Mapping[str, int]]) -> None:
        for name, expected in self._sums.items():
            for tensor, number in expected.items():
                if sums[name].get(tensor) != number:
                    raise StateDiffers(f"{name}: {tensor} is not what it was before the move.")

    def _put_in_force(self, submit: Submit) -> None:
        """Form the new plan's units, and free what was kept of the old one."""
        boundary = self.boundary
        self._on_all(
            "commit_transition",
            epoch=self._epoch,
            counters=dict(boundary.counters),
            policy_version=boundary.policy_version,
        )
        execute(self.graph, submit, after_commit=True)
        self._on_all("end_transition", epoch=self._epoch)

    # The way back

    def _undo(self, error: Exception, submit: Submit) -> dict[str, Any]:
        """Lead every model-stage back to the old plan."""
        reason, old = _reason(error), self.graph.current
        if self.graph.lost:
            raise GoBack(self.graph.target, reason) from error
        try:
            lost = self._engine.recover(step=self.boundary.step) if self._engine.broken is not None else ()
            gone = sorted(set(lost) & set(old.devices))
            if gone:
                raise GoBack(old, f"{reason}; what device {', '.join(map(str, gone))} held is gone")
            if self._is_begun:
                self._undo_moves(submit)
        except (FencedOff, GoBack):
            raise
        except Exception as failure:  # whatever keeps it from the way back, the last commit is there
            raise GoBack(old, f"{reason}; then {_reason(failure)}") from error
        self._note("rolled_back", reason)
        return self._line("rolled_back", reason)

    def _undo_moves(self, submit: Submit) -> None:
        progress = self._progress
        for id in sorted(progress.under_way):
            primitive = self._by_id[id]
            if primitive.makes:
                self._on_all("drop_primitive", primitive.devices, primitive=primitive)
        undo = plan_undo(self.graph, list(progress.ended), self._memory, sorted(progress.under_way))
        self._move_back(undo, submit)
        if undo.primitives:
            self._compare(self._sum_up(self.graph.current))
        self._on_all("undo_transition", epoch=self._epoch)

    def _move_back(self, undo: TransitionGraph, submit: Submit) -> None:
        self._by_id.update(undo.by_id)
        for primitive in undo.primitives:
            self._progress.started[primitive.id] = threading.Event()
        if any(primitive.transport == "direct" for primitive in undo.primitives):
            self._epoch = next_epoch()  # what was under way may have left messages behind
            self._connect(self.graph.current, ())
        execute(undo, submit)

    # Records

    def line_after(self, failure: GoBack) -> dict[str, Any]:
        """Return the line of transitions.jsonl for a run that was built again from its last commit, and journal it.

        `in_force` says on which of its two plans.
        """
        self._note("recovered", failure.reason)
        is_new = emus_of(failure.plan) == emus_of(self.graph.target)
        return {**self._line("recovered", failure.reason), "in_force": "to" if is_new else "from"}

    def _note(self, outcome: str, reason: str) -> None:
        """Journal how a failed attempt ended. Nothing depends on this record, so a store that fails ends no job.

        Raises:
            FencedOff: another driver has taken the run over.
        """
        try:
            tried(lambda: self._write_record(self._journal_body(outcome, reason)))
        except OSError as error:
            logger.warning("The journal could not take note of a transition that was %s (%s).", outcome, _reason(error))

    def discard_sets(self) -> None:
        """Remove what was staged for this transition alone."""
        self._sets.discard()

    def _line(self, outcome: str, reason: str = "") -> dict[str, Any]:
        ended = self._progress.ended
        primitives = [
            {
                "id": primitive.id,
                "kind": primitive.kind,
                "model_stage": primitive.model_stage,
                "depends_on": list(primitive.depends_on),
                "transport": primitive.transport,
                **ended[primitive.id],
            }
            for primitive in self._by_id.values()
            if primitive.id in ended
        ]
        line = {
            "step": self.boundary.step,
            "from": self.graph.current.to_record(),
            "to": self.graph.target.to_record(),
            "primitives": primitives,
            "seconds": time.perf_counter() - self._began_s,
            "bytes": sum(primitive["bytes"] for primitive in primitives),
            "verified": self.verified,
            "outcome": outcome,
        }
        return {**line, "reason": reason} if reason else line

    def _journal_body(self, outcome: str, reason: str = "") -> dict[str, Any]:
        body = {
            "step": self.boundary.step,
            "from": self.graph.current.to_record(),
            "to": self.graph.target.to_record(),
            "outcome": outcome,
        }
        return {**body, "reason": reason} if reason else body

    def _on_all(self, method: str, devices: Sequence[int] = (), **arguments: Any) -> None:
        label = method.partition("_")[0]
        self._run(label, method, dict.fromkeys(devices or self._devices, arguments))

    def _run(self, label: str, method: str, kwargs: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        where = label if "/" in label else f"{label} of the transition"
        return run_command(self._engine, method, kwargs, label=where, step=self.boundary.step)


def _units(plan: Plan, name: str) -> set[Emu]:
    return {unit for unit in emus_of(plan) if unit.model_stage == name}


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
