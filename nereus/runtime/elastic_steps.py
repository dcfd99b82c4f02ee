"""The steps of PPO on plans that change: which plan is due, the move to it, and the way back to the last commit.

transition_due -> begin_transition: workers, speeds, graph -> run: move | undo | build again from the last commit
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nereus.commits import read_commit
from nereus.emu import emus_of
from nereus.plan import Plan
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.opening import OpenRun
from nereus.runtime.probe import measure_speeds
from nereus.runtime.staged_steps import StagedSteps
from nereus.runtime.transition import Boundary, GoBack, Submit, Transition
from nereus.runtime.transition_sets import TransitionSets
from nereus.transition.execute import on_threads
from nereus.transition.graph import InfeasibleTransition, StagedSet, plan_transition
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import TransitionGraph
from nereus.transition.speeds import Speeds
from storage.manifest import Manifest
from storage.urls import join_url

logger = logging.getLogger(__name__)

# A change of the plan that failed is tried again at the next step, this often in all.
MOST_ATTEMPTS = 2
# Going back to a commit may meet further losses.
_MOST_RETURNS = 3
_THREADS = 8


class ElasticSteps(StagedSteps):
    """PPO steps that go on, on another plan, after each transition."""

    def __init__(self, run: OpenRun, engine: Engine, *, owns_engine: bool) -> None:
        super().__init__(run, engine)
        self._owns_engine = owns_engine
        self._wanted = self.plan  # by the schedule; `plan` may have its devices in another rank order
        self._followed = 0  # the schedule has been followed up to this step, wherever the run has gone back to
        self._attempts: dict[Plan, list[int]] = {}  # steps at which a move to a plan was tried
        self._speeds: Speeds | None = None
        self._lost: frozenset[int] = frozenset()  # devices of the plan in force whose memory is gone
        self._is_torn = False  # a command was broken off: communicators hold what nobody wants any more
        self._is_given_up = False  # nothing that lives is of use: all is being built again from the last commit
        self._transition: Transition | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all that the plan in force needs lives and works; else a transition is due."""
        return not (self._is_torn or self._lost)

    # What is due

    def transition_due(self, step: int) -> bool:
        """Return whether the plan changes before `step`; settings that move no state are taken over at once."""
        self._followed = max(self._followed, step)
        due = self._due()
        if due == self._wanted:
            return False
        if emus_of(due) == emus_of(self._wanted):
            self._take_settings(due)
            return False
        tried = self._attempts.get(due, [])
        return step not in tried and len(tried) < MOST_ATTEMPTS

    def _due(self) -> Plan:
        return self.job.plan_at(self._followed)

    def _take_settings(self, wanted: Plan) -> None:
        """Take over micro-batches and recomputation."""
        for name, stage in wanted.items():
            self.plan = self.plan.with_stage(name, micro_batch=stage.micro_batch, recompute=stage.recompute)
        self._wanted = wanted

    # The move

    def begin_transition(self, step: int) -> Transition:
        """Start the workers of new devices and return the transition to the plan that is due."""
        target, began_s = self._due(), time.perf_counter()
        self._attempts.setdefault(target, []).append(step)
        with self._clock.span("transition"):
            try:
                graph, committed = self._plan_move(step, target)
                self._transition = self._move(step, graph, committed, began_s)
            except (InfeasibleTransition, CommandError) as error:  # told and undone as any other failure
                nothing = TransitionGraph(self.plan, target, (), lost=self._lost)
                self._transition = self._move(step, nothing, None, began_s, error)
        return self._transition

    def _plan_move(self, step: int, target: Plan) -> tuple[TransitionGraph, tuple[str, Manifest] | None]:
        transport = self.config.transport
        staged_set, committed = self._staged_set(step, may_be_pending=transport == "staged")
        living = self._living(step)  # a worker may have died of the commit that was waited for
        started = [device for device in target.devices if device not in living]
        if started:
            self._engine.start(started)
        self._measure({*self.plan.devices, *target.devices})
        graph = plan_transition(
            self.plan,
            target,
            self._transition_memory(),
            transport=transport,
            staged_set=staged_set,
            lost=self._lost,
            speeds=self._speeds,
        )
        return graph, committed

    def _transition_memory(self) -> TransitionMemory:
        """Return what a move may use now."""
        return self.job.transition_memory

    def _living(self, step: int) -> frozenset[int]:
        """Return the devices that have a worker.

        Raises:
            CommandError: one of the plan in force has died; another in its place would hold nothing.
        """
        living = frozenset(self._engine.pids())
        dead = sorted(set(self.plan.devices) - living - self._lost)
        if dead:
            text = f"device {dead[0]} was lost before step {step}"
            self._engine.mark_broken(text)
            raise CommandError(text, device=dead[0], label="session", step=step)
        return living

    def _move(
        self,
        step: int,
        graph: TransitionGraph,
        committed: tuple[str, Manifest] | None,
        began_s: float,
        failure: Exception | None = None,
    ) -> Transition:
        assert self._staging is not None
        return Transition(
            self._engine,
            self.job,
            graph,
            Boundary(step, self.plan, dict(self.counters), self.policy_version),
            TransitionSets(self._engine, self._staging, graph, self.job.sources, step=step, committed=committed),
            memory=self._transition_memory(),
            speeds=self._speeds,
            write_record=self._journal_transition,
            failure=failure,
            began_s=began_s,
            reconnect=self._is_torn,
        )

    def _journal_transition(self, body: dict[str, Any]) -> None:
        self._opened.owner.journal.append("transition", body)

    def find_transition(self) -> Transition:
        """Return the transition that is under way."""
        assert self._transition is not None, "no transition is under way"
        return self._transition

    def run_transition(self, submit: Submit | None = None) -> dict[str, Any]:
        """Carry the begun transition out, or back; return its line of transitions.jsonl.

        Args:
            submit: starts a primitive by the transition's `run_primitive`; without it threads do.

        Raises:
            CommandError: workers died again and again; the run can be resumed.
        """
        transition = self.find_transition()
        try:
            with self._clock.span("transition"), ThreadPoolExecutor(_THREADS, "nereus-transition") as pool:
                try:
                    line = transition.run(submit or on_threads(pool, lambda p: transition.run_primitive(p.id)))
                    if line["outcome"] == "committed":
                        self._adopt(transition.graph.target)
                except GoBack as failure:
                    self._go_back(failure.plan)
                    line = transition.line_after(failure)
                self._leave_unused()
                transition.discard_sets()
        finally:
            self._transition = None
        if line["outcome"] != "rolled_back":
            self._lost, self._is_torn = frozenset(), False
        self._note(line)
        return line

    def _adopt(self, plan: Plan) -> None:
        """Go on, on the new plan.

        Raises:
            GoBack: a worker was lost meanwhile.
        """
        assert self._staging is not None
        self.plan, self._wanted = plan, self._due()
        self._staging.wait()
        try:
            self._staging.adopt(self._hold_shards(), self._spare_bytes(plan))
        except CommandError as error:
            raise GoBack(plan, f"after the commit of the new plan: {error}") from error

    def _leave_unused(self) -> None:
        """End the workers of devices that the plan in force doesn't use, unless they are others'."""
        if not self._owns_engine:
            return
        unused = sorted(set(self._engine.pids()) - set(self.plan.devices))
        if unused:
            self._engine.release(unused)

    def _staged_set(self, step: int, *, may_be_pending: bool) -> tuple[StagedSet, tuple[str, Manifest] | None]:
        """Return whether storage has the state of the boundary before `step`, and if it is complete, where."""
        assert self._staging is not None
        if may_be_pending and self._staging.pending_step == step - 1:
            return "pending", None
        self._staging.wait()  # what it writes from may be freed
        newest = self._staging.newest
        if newest is None or newest.step != step - 1:
            return "none", None
        root = self._opened.staging_root
        try:
            return "committed", (join_url(root, newest.set_name), read_commit(root, newest))
        except (OSError, ValueError) as error:
            logger.warning("The commit of step %d can't be read for the transition (%s).", newest.step, error)
            return "none", None

    def _measure(self, devices: Collection[int]) -> Speeds:
        """Return what these devices reach; measured once."""
        if self._speeds is None:
            root, kind = self._opened.staging_root, self.config.cluster.device
            self._speeds = measure_speeds(self._engine, sorted(devices), root, device_type=kind)
        return self._speeds

    def _note(self, line: dict[str, Any]) -> None:
        """Write the line of transitions.jsonl, and say in the log how it ended."""
        self._records.append_transition(line, self._opened.owner.check)
        if line["outcome"] == "committed":
            logger.info("step %d: the plan has changed in %.2f s.", line["step"], line["seconds"])
        else:
            how, why = line["outcome"], line.get("reason", "no reason is known")
            logger.warning("step %d: the change of the plan failed (%s): %s.", line["step"], how, why)

    # The way back

    def _go_back(self, plan: Plan) -> None:
        """Build everything again on a plan, from the newest commit.

        Raises:
            CommandError: workers are lost again and again.
        """
        assert self._staging is not None
        self._is_given_up, full = True, None
        for attempt in range(_MOST_RETURNS):
            try:
                if self._engine.broken is not None:
                    self._engine.recover(step=self.next_step)
                if full is not None:
                    self._start_afresh({full})
                self._staging.wait()
                self._build_again(plan)
                break
            except CommandError as error:
                if attempt + 1 == _MOST_RETURNS:
                    raise
                full = error.device if error.out_of_memory else None
        self._is_given_up = False

    def _start_afresh(self, devices: Collection[int]) -> None:
        """Have new workers in place of live ones whose memory ran out: a heap that was full stays full of holes."""
        living = sorted(set(devices) & set(self._engine.pids()))
        self._engine.release(living)
        self._engine.start(living)

    def _build_again(self, plan: Plan) -> None:
        assert self._staging is not None
        living = list(self._engine.pids())
        self._run("session", "release", {device: {} for device in living}, None)
        missing = [device for device in plan.devices if device not in living]
        if missing:
            self._engine.start(missing)
        was = self.next_step
        if emus_of(plan) != emus_of(self.plan):
            self._wanted = self._due()
        self.plan = plan
        self._build(self._staging.commits)
        if self.next_step != was:
            logger.warning("The run goes on from step %d, after its last commit.", self.next_step)
            self._records.cut_back(self.next_step, self._opened.owner.check)
        self._staging.adopt(self._hold_shards(), self._spare_bytes(plan), next_step=self.next_step)
        self._sync(None)
