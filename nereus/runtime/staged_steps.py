"""The steps of PPO with their state in storage: committed beside the next step, and gone on from after a restart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from nereus.commits import Commit
from nereus.cost.memory import spare_bytes
from nereus.limits import REMOTE_SHARD_BYTES, SHARD_BYTES
from nereus.plan import Plan
from nereus.runtime.engine import Engine
from nereus.runtime.model_stages import build_model_stages, restore_newest
from nereus.runtime.opening import OpenRun
from nereus.runtime.ppo_steps import PpoSteps
from nereus.runtime.rank_state import Counters
from nereus.runtime.staging import Staging
from nereus.staged_state import ShardOrder, plan_shards
from storage.urls import join_url, local_path


class StagedSteps(PpoSteps):
    """PPO steps of a run that this process drives.

    Attributes:
        next_step: the step that comes next.
    """

    def __init__(self, run: OpenRun, engine: Engine) -> None:
        super().__init__(run.job, engine)
        self.next_step = 0
        self._opened = run
        self._records = run.run_dir
        self._staging: Staging | None = None

    @property
    def steps(self) -> range:
        """The steps that are still to be done."""
        return range(self.next_step, self.config.steps)

    def _build(self, commits: Sequence[Commit]) -> None:
        """Bring all model-stages to life on the plan: from the newest commit that is whole, or from their sources."""
        build_model_stages(self._engine, self.job, self.plan, from_source=not commits)
        if not commits:
            self.next_step = 0
            self._begin_anew()
            return
        root = self._opened.staging_root
        commit, manifest = restore_newest(self._engine, self.plan, root, commits, self._opened.run_id)
        state = manifest.run_state
        self.next_step = commit.step + 1
        self.policy_version = state["policy_version"]
        self.kl = replace(self.kl, coef=state["kl_coef"])
        self.counters = {name: Counters(**counts) for name, counts in state["counters"].items()}

    def _start_staging(self) -> None:
        commits = [commit for commit in self._opened.commits or () if commit.step < self.next_step]
        self._staging = Staging(
            self._engine,
            self._opened.owner,
            self._opened.staging_root,
            self._hold_shards(),
            run_id=self._opened.run_id,
            keep=self.config.staging.keep,
            lease_s=self.config.staging.lease_s,
            spare_bytes=self._spare_bytes(self.plan),
            commits=commits,
        )
        # What killed drivers have left goes; a damaged commit stays until another has taken its place.
        self._staging.retire([commit.set_name for commit in self._opened.commits or ()])

    def _hold_shards(self) -> dict[int, tuple[ShardOrder, ...]]:
        """Share out who writes what of the plan in force, tell the workers, and return it."""
        element_bytes = 8 if self.config.precision == "float64" else 4
        shard_bytes = REMOTE_SHARD_BYTES if local_path(self._opened.staging_root) is None else SHARD_BYTES
        orders = plan_shards(self.plan, self.job.specs, element_bytes=element_bytes, max_shard_bytes=shard_bytes)
        mine = {device: {"orders": orders.get(device, ())} for device in self.plan.devices}
        self._run("staging", "hold_shards", mine, None)
        return orders

    def _spare_bytes(self, plan: Plan) -> dict[int, int]:
        return spare_bytes(plan, self.job.specs, self.job.workload, self.config.precision, self.job.capacities)

    def _before_update(self, model_stage: str) -> None:
        if self._staging is not None:
            with self._clock.span("staging"):
                self._staging.before_update(model_stage)

    def stage_state(self, step: int) -> dict[str, Any]:
        """Begin to commit the state at the end of a step, if it is due; the next step goes on meanwhile."""
        assert self._staging is not None
        is_due = (step + 1) % self.config.staging.every == 0 or step + 1 == self.config.steps
        if is_due:
            with self._clock.span("staging"):
                self._begin_commit(step)
        return {"begun": step if is_due else None, "newest": self.newest_state}

    def _begin_commit(self, step: int) -> None:
        """Begin to commit the state at the end of a step: that of now."""
        assert self._staging is not None
        self._staging.wait()  # what the commit before has told need not be told again
        self._staging.begin(step, self._run_state(step), self.plan.to_record(), self._notes())

    def _notes(self) -> dict[str, Any]:
        """Return what the journal is to say with the next commit."""
        return {}

    def _run_state(self, step: int) -> dict[str, Any]:
        return {
            "step": step,
            "policy_version": self.policy_version,
            "kl_coef": self.kl.coef,
            "counters": {name: asdict(counters) for name, counters in self.counters.items()},
            "identity": dict(self._opened.identity),
        }

    @property
    def newest_state(self) -> dict[str, Any] | None:
        """Step and place of the newest commit, which a resume would go on from."""
        newest = self._staging.newest if self._staging is not None else None
        if newest is None:
            return None
        return {"step": newest.step, "url": join_url(self._opened.staging_root, newest.set_name)}

    def _stage_last(self) -> None:
        """Wait until the last step is committed; a commit that failed is tried once more."""
        assert self._staging is not None
        self._staging.wait()
        last, newest = self.next_step - 1, self._staging.newest
        if last >= 0 and (newest is None or newest.step != last):
            self._begin_commit(last)
            self._staging.wait()
