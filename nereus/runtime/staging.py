"""The driver's part of staged state: a step's shards are written beside the next step, then it is committed.

begin(step) -> workers write shards -> manifest -> journal record -> retention       in a thread of its own
before_update(model_stage): what is still unwritten is copied, or the update waits   the pause that a step may see

The tensors of a model-stage are constant from the end of a step to its first update in the next one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from nereus.commits import Commit, live_commits
from nereus.limits import REMOTE_SHARD_BYTES, REMOTE_SHARDS_IN_FLIGHT, SHARDS_IN_FLIGHT
from nereus.runtime.engine import Engine
from nereus.runtime.shard_queue import MOST_TRIES, ShardQueue
from nereus.staged_state import ShardOrder
from storage.errors import describe_error, hide_credentials
from storage.journal import FencedOff
from storage.manifest import Manifest
from storage.owner import Owner
from storage.retention import discard_set, retire
from storage.state import commit_state
from storage.urls import join_url, local_path

logger = logging.getLogger(__name__)
T = TypeVar("T")

_RETRY_WAIT_S = 0.5


class Staging:
    """Commits the state of a run, one step at a time."""

    def __init__(
        self,
        engine: Engine,
        owner: Owner,
        root: str,
        orders: Mapping[int, Sequence[ShardOrder]],
        *,
        run_id: str,
        keep: int,
        lease_s: float,
        spare_bytes: Mapping[int, int],
        commits: Sequence[Commit] = (),
    ) -> None:
        """Describe what is written where; nothing is written yet.

        Args:
            root: folder of the staged sets, any fsspec URL.
            orders: per device the shards that it writes; its worker holds them.
            keep: newest commits that are kept.
            lease_s: how long a reader of another host may be silent.
            spare_bytes: per device what copies of unwritten shards may take.
            commits: those that the run can go on from already, by step.
        """
        self._engine, self._owner, self._root, self._orders = engine, owner, root, orders
        self._run_id, self._keep, self._lease_s, self._spare_bytes = run_id, keep, lease_s, spare_bytes
        self._commits = list(commits)
        self._doubtful: list[str] = []  # sets whose commit the journal may hold: no answer came
        self._queue: ShardQueue | None = None
        self._thread: threading.Thread | None = None
        self._fenced: FencedOff | None = None
        self._closed = False

    @property
    def newest(self) -> Commit | None:
        """The commit that a resume would go on from."""
        return self._commits[-1] if self._commits else None

    def begin(self, step: int, run_state: dict[str, Any], plan: dict[str, Any]) -> None:
        """Begin to write the state at the end of `step`, once the commit before is done.

        Raises:
            FencedOff: another driver has taken the run over.
        """
        self.wait()
        name = f"step-{step:08d}-{self._owner.number}"
        is_remote = local_path(self._root) is None
        self._queue = ShardQueue(
            self._engine,
            join_url(self._root, name),
            self._orders,
            self._spare_bytes,
            shards_in_flight=REMOTE_SHARDS_IN_FLIGHT if is_remote else SHARDS_IN_FLIGHT,
            bytes_in_flight=REMOTE_SHARDS_IN_FLIGHT * REMOTE_SHARD_BYTES if is_remote else None,
        )
        arguments = (self._queue, name, step, run_state, plan)
        self._thread = threading.Thread(target=self._commit, args=arguments, name="nereus-staging", daemon=True)
        self._thread.start()

    def before_update(self, model_stage: str) -> None:
        """Return when updates of a model-stage can't spoil the pending commit: its shards are written or copied.

        Raises:
            FencedOff: another driver has taken the run over.
        """
        if self._queue is not None:
            self._queue.make_way(model_stage)
        self._check()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the pending commit, if there is one; return whether none is left.

        Raises:
            FencedOff: another driver has taken the run over.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        self._check()
        return True

    def close(self, timeout_s: float = 20.0) -> None:
        """Give the pending commit some time to end; what isn't committed then is given up."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._closed = True
        if self._queue is not None:
            self._queue.stop()

    def retire(self, also_kept: Collection[str] = ()) -> None:
        """Remove the sets that nobody needs: of older commits, and of writers that were killed."""
        keep = {*also_kept, *self._doubtful, *(commit.set_name for commit in self._commits[-self._keep :])}
        try:
            retire(self._root, keep=keep, lease_s=self._lease_s, take_over=self._owner.number)
        except Exception as error:  # every store has errors of its own
            where = hide_credentials(self._root)
            logger.warning("Old staged state in %s can't be removed (%s).", where, describe_error(error))

    def _check(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._closed:
            raise RuntimeError("the run is being stopped.")

    # The thread

    def _commit(
        self, shards: ShardQueue, name: str, step: int, run_state: dict[str, Any], plan: dict[str, Any]
    ) -> None:
        """Write all shards of one step and commit them; a failure is warned of, and the run goes on without."""
        try:
            records = shards.write_all()
            manifest = Manifest(self._run_id, step, run_state, plan, records)
            checksum = self._try(lambda: commit_state(join_url(self._root, name), manifest))
            body = {"step": step, "set": name, "manifest": checksum}
            self._doubtful.append(name)
            entry = self._try(lambda: self._owner.journal.append("commit", body))
            self._take_note(Commit.of(entry))
        except FencedOff as error:
            self._fenced = error
            self._discard(name)
            return
        except Exception as error:  # every store has errors of its own
            self._warn(step, error)
            if not self._closed:
                shards.drain()
        if not self._closed:
            self.retire()

    def _discard(self, name: str) -> None:
        """Remove the set of a commit that nobody will ever know of: the new driver may be through with its removals."""
        try:
            discard_set(self._root, name)
        except Exception as error:  # every store has errors of its own
            logger.warning("%s of %s stays (%s).", name, hide_credentials(self._root), describe_error(error))

    def _take_note(self, newest: Commit) -> None:
        """Add a commit, and those before it that are in the journal although their writer heard nothing of it."""
        known = {commit.set_name for commit in self._commits} | set(self._doubtful)
        in_doubt, self._doubtful = len(self._doubtful) > 1, []
        if in_doubt:
            entries = self._owner.journal.entries()
            self._commits = [commit for commit in live_commits(entries) if commit.set_name in known]
        else:
            self._commits = [commit for commit in self._commits if commit.step < newest.step] + [newest]

    def _try(self, action: Callable[[], T]) -> T:
        """Do it again after an error of the store."""
        for _ in range(MOST_TRIES - 1):
            try:
                return action()
            except OSError:
                time.sleep(_RETRY_WAIT_S)
        return action()

    def _warn(self, step: int, error: Exception) -> None:
        back = f"step {self.newest.step}" if self.newest is not None else "the start"
        logger.warning(
            "The state of step %d was not staged (%s); the run goes on, and a resume would begin after %s.",
            step,
            describe_error(error),
            back,
        )
