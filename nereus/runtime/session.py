"""A running job: its driver's right to it, its workers, its steps, and the state that it could go on from.

open: begin or go on -> PPO steps (ppo_steps.py), each with finish_step -> stage_state -> finish: export -> close
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from nereus.config import RunConfig
from nereus.controller.decision import StepOutcome
from nereus.model.export import abandon_export, begin_export, finish_export
from nereus.rewards import RewardPool
from nereus.runtime.adaptive_steps import NoDevices
from nereus.runtime.engine import Engine
from nereus.runtime.local import LocalEngine
from nereus.runtime.measure import collect_metrics, measure_step
from nereus.runtime.opening import OpenRun, open_run
from nereus.runtime.redone_steps import STEP_FAILURES, RedoneSteps
from nereus.runtime.rollouts import Rollouts
from nereus.runtime.timing import StepClock
from nereus.runtime.transition import Transition
from nereus.runtime.worker import HEAP_ALLOWANCE
from nereus.tracking import Trackers, open_trackers

__all__ = ["STEP_FAILURES", "NoDevices", "Session", "find_session", "make_engine"]

_open_sessions: dict[str, Session] = {}


def find_session(run_id: str) -> Session:
    """Return the session of a run that is open in this process."""
    return _open_sessions[run_id]


class Session(RedoneSteps):
    """Everything that a running job holds; a context manager, so that every way out frees the workers."""

    def __init__(self, run: OpenRun, *, engine: Engine | None = None) -> None:
        super().__init__(run, engine or make_engine(run.job.config), owns_engine=engine is None)
        self.run_id = run.run_id
        self.run_dir = run.run_dir.url
        self.outcome: StepOutcome | None = None  # what was measured of the last step
        self._mapped_before: dict[int, int] = {}  # bytes of each worker's cap, as the step began
        # The engine's generation whose workers measure memory since the last step's end, if nothing has used any since.
        self._measuring: int | None = None
        self._trackers: Trackers | None = None
        self._close_lock = threading.Lock()

    @classmethod
    def open(
        cls,
        config: RunConfig,
        *,
        run_id: str,
        engine: Engine | None = None,
        flow_run_id: str | None = None,
        resume_from: str | None = None,
    ) -> Self:
        """Check everything at the door, then start the workers and build all model-stages, on the newest commit if any.

        Args:
            run_id: of a new run; one that goes on keeps its own.
            engine: running workers to use; they outlive the session. Without it the session has workers of its own.
            flow_run_id: the flow run that asks; it goes on with the run that it has begun in this directory.
            resume_from: directory of the run to go on with, any fsspec URL; None: begin one.

        Raises:
            ValueError: the config can't run, or not here; raised before any worker starts.
            CommandError: a worker failed.
        """
        if run_id in _open_sessions:
            raise ValueError(f"run_dir: run {run_id} is open in this process already; choose another directory.")
        run = open_run(config, run_id=run_id, flow_run_id=flow_run_id, resume_from=resume_from)
        with ExitStack() as undo:
            undo.callback(run.undo)
            session = cls(run, engine=engine)
            undo.callback(session.close)
            session._start()
            undo.pop_all()
        _open_sessions[session.run_id] = session
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self._owns_engine:  # what the step in flight still does is in the way of the end
            self._engine.mark_broken("the run was stopped")
        self.close()

    def close(self) -> None:
        """Let a pending commit end, free all processes and trackers, and give the run up; may be called twice."""
        if _open_sessions.get(self.run_id) is self:
            del _open_sessions[self.run_id]
        with self._close_lock, ExitStack() as stack:  # what one part raises keeps no other from being closed
            stack.callback(self._opened.close)
            if self._trackers is not None:
                stack.callback(self._trackers.close)
            if self._reward_pool is not None:
                stack.callback(self._reward_pool.close)
            stack.callback(self._engine.close if self._owns_engine else self._release)
            stack.callback(self._deadlines.close)
            if self._staging is not None:
                stack.callback(self._staging.close)

    def _release(self) -> None:
        if self._engine.broken is None:
            self._run("session", "release", {device: {} for device in self.plan.devices}, None)

    def _start(self) -> None:
        config, commits = self.config, self._opened.commits
        if config.reward.function is not None:
            self._reward_pool = RewardPool(
                config.reward.function, num_workers=config.reward.workers, timeout_s=config.reward.timeout_s
            )
            self._reward_pool.__enter__()
        self._trackers = open_trackers(config.tracking, self.run_dir, config)
        self._begin_control()
        self._build(commits or ())
        if not self._opened.is_new:
            self._records.cut_back(self.next_step, self._opened.owner.check)  # restoring may have taken long
        self._start_staging()
        self._sync(None)
        self._clock = StepClock()

    def begin_transition(self, step: int) -> Transition:
        self._measuring = None
        return super().begin_transition(step)

    # The ends of a step and of the run

    def begin_step(self, rollouts: Rollouts | None = None) -> None:
        super().begin_step(rollouts)
        measuring, self._measuring = self._measuring, None
        if measuring == self._engine.generation and self._mapped_before.keys() == set(self.plan.devices):
            return
        # What building, moving or a broken attempt has needed is none of this step's.
        devices: dict[int, dict[str, Any]] = {device: {} for device in self.plan.devices}
        # A worker that was lost since the last step is told of as lost in the first stage of this one.
        self._mapped_before = self._run("actor.generation", "begin_memory", devices, self.next_step)

    def _judged_bytes(self, device: int, peak: int, mapped: int) -> int:
        """Return what a device's memory is judged by: its peak, and what the step has mapped beyond that.

        The cap of a worker on the CPU counts all that its heap has mapped. What was mapped before is none of the
        step's, and what goes beyond the holes of a heap is none of the plan's.
        """
        added = mapped - self._mapped_before[device]
        return max(peak, min(mapped, peak + added, int(HEAP_ALLOWANCE * peak)))

    def finish_step(self, step: int) -> dict[str, Any]:
        """Write the step's line of metrics.jsonl and return it."""
        memory = self._run("memory", "read_memory", {device: {} for device in self.plan.devices}, step)
        peaks = {device: peak for device, (peak, _) in memory.items()}
        judged = {device: self._judged_bytes(device, *measured) for device, measured in memory.items()}
        self._mapped_before = {device: mapped for device, (_, mapped) in memory.items()}
        self._measuring = self._engine.generation
        work_s = self._clock.work_s()
        metrics = collect_metrics(
            step=step,
            policy_version=self._step_policy_version,
            kl_coef=self._kl_coef,
            rollouts=self.rollouts,
            stats=self._stats,
            max_response_tokens=self.config.rollout.max_response_tokens,
            plan=self.plan,
            clock=self._clock,
            peaks=peaks,
        )
        self.outcome = measure_step(
            step=step,
            seconds=work_s,
            times=self._clock.times,
            rollouts=self.rollouts,
            plan=self.plan,
            max_response_tokens=self.config.rollout.max_response_tokens,
            peaks=judged,
        )
        self._learn(self.outcome, metrics)
        self._records.append_metrics(metrics, self._opened.owner.check)  # one that was taken for dead writes no more
        if self._trackers is not None:
            self._trackers.log(step, metrics)
        self._rollouts, self.next_step = None, step + 1
        self._clock = StepClock()  # what happens between two steps is the next one's time
        return metrics

    def finish(self) -> dict[str, Any]:
        """Commit the last step, write the actor to RUN_DIR/final as a Hugging Face checkpoint, say where they lie.

        Raises:
            CommandError: a worker was lost or failed; where the plan may change, `make_ready` leads on.
        """
        self._stage_last()
        if self.adapts:  # else what is left of the plan may be enough for the checkpoint
            self._living(self.next_step)
        name, source = "actor.training", self.job.sources["actor.training"]
        export = begin_export(
            self._records.path("final"),
            source.spec,
            dtype=torch.float32 if self.config.precision == "bfloat16" else getattr(torch, self.config.precision),
            config_from=source.path,
            tokenizer_from=self.job.tokenizer_path,
            replace=True,
        )
        kwargs = {device: {"model_stage": name, "plan": export} for device in self.plan[name].devices}
        try:
            written = sum(self._run(name, "write_export", kwargs, None).values())
            self._opened.owner.check()
            finish_export(export, written_bytes=written)
        except BaseException:
            abandon_export(export)
            raise
        return {
            "run_dir": self.run_dir,
            "final": self._records.path("final"),
            "bytes": written,
            "staged_state": self.newest_state,
        }

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics of all steps so far, of those before a resume too."""
        return self._records.read("metrics.jsonl")

    def read_decisions(self) -> list[dict[str, Any]]:
        """Return the lines of decisions.jsonl of all steps so far."""
        return self._records.read("decisions.jsonl")

    def read_transitions(self) -> list[dict[str, Any]]:
        """Return the lines of transitions.jsonl of all steps so far."""
        return self._records.read("transitions.jsonl")

    def settle(self) -> None:
        """Commit the last step: the run ends here, to be resumed; without its state, from the commit before."""
        if self._engine.broken is None and self._has_state:
            self._stage_last()

    def worker_pids(self) -> dict[int, int]:
        """Return the process of each device's worker."""
        return self._engine.pids()


def make_engine(config: RunConfig) -> Engine:
    """Return the engine that a config asks for, without workers yet."""
    return LocalEngine(
        "nereus.runtime.rank:Rank",
        device=config.cluster.device,
        threads_per_device=config.cluster.threads_per_device,
        memory_per_device_bytes=config.cluster.memory_per_device,
    )
