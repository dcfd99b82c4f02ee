"""The driver's part of staged state: a step's shards are written beside the next step, then it is committed.

begin(step) -> workers write shards -> manifest -> journal record -> retention       in a thread of its own
before_update(model_stage): what is still unwritten is copied, or the update waits   the pause that a step may see
follow(callback): the shards of the pending commit, each as soon as it is complete   for a transition that reads along
write_transition_set(group) -> manifest, no journal record                           for a transition without a commit

The tensors of a model-stage are constant from the end of a step to its first update in the next one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.commits import Commit, live_commits
from nereus.runtime.engine import Engine
from nereus.runtime.record_feed import Follower, RecordFeed
from nereus.runtime.set_writer import TransitionSetWriter
from nereus.runtime.shard_queue import ShardFailed, ShardQueue, tried
from nereus.staged_state import ShardOrder
from storage.errors import describe_error, hide_credentials
from storage.journal import FencedOff
from storage.manifest import MANIFEST_NAME, Manifest, ShardRecord
from storage.owner import Owner
from storage.retention import discard_set, retire
from storage.small_files import remove_file
from storage.state import commit_state
from storage.urls import join_url

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """A commit: the step, the name of its set, and its records as they come."""

    step: int
    name: str
    feed: RecordFeed
    notes: Mapping[str, Any]


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
        self._pending: _Pending | None = None  # the last one that was begun
        self._sets = TransitionSetWriter(engine, root, run_id=run_id, take_over=owner.number)
        self._thread: threading.Thread | None = None
        self._fenced: FencedOff | None = None
        self._closed = False

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The commits that the run can go on from, by step."""
        return tuple(self._commits)

    @property
    def newest(self) -> Commit | None:
        """The commit that a resume would go on from."""
        return self._commits[-1] if self._commits else None

    def begin(
        self, step: int, run_state: dict[str, Any], plan: dict[str, Any], notes: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to write the state at the end of `step`, once the commit before is done.

        Args:
            run_state: what the set keeps beside the tensors.
            notes: what the journal's record says beside the place of the set.

        Raises:
            FencedOff: another driver has taken the run over.
        """
        self.wait()
        name = f"step-{step:08d}-{self._owner.number}"
        self._pending = pending = _Pending(step, name, RecordFeed(), notes or {})
        folder = join_url(self._root, name)
        self._queue = ShardQueue.at(folder, self._engine, self._orders, self._spare_bytes, pending.feed.put)
        arguments = (self._queue, pending, run_state, plan)
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

    @property
    def pending_step(self) -> int | None:
        """The step whose commit is under way, if one is."""
        return self._pending.step if self._pending is not None and not self._pending.feed.ended else None

    def follow(self, follower: Follower) -> str:
        """Pass on the records of the commit under way, or of the last one that was, and return the folder of its set.

        `follower(record, None)` is called for all records so far and then for each shard as it completes; at the end
        `(None, None)` when the set is committed, `(None, error)` when it never will be. Calls come from this thread
        for what has happened, from the one that commits for what comes.
        """
        assert self._pending is not None, "nothing was begun"
        self._pending.feed.follow(follower)
        return join_url(self._root, self._pending.name)

    def adopt(
        self,
        orders: Mapping[int, Sequence[ShardOrder]],
        spare_bytes: Mapping[int, int],
        *,
        next_step: int | None = None,
    ) -> None:
        """Go on with other shards, since the plan has changed; only without a pending commit.

        Args:
            orders: per device the shards that it writes; its worker holds them already.
            spare_bytes: per device what copies of unwritten shards may take.
            next_step: of a run that has gone back: commits of this step and later ones are void.
        """
        assert self._thread is None or not self._thread.is_alive(), "a commit is pending"
        self._orders, self._spare_bytes = orders, spare_bytes
        if next_step is not None:
            self._commits = [commit for commit in self._commits if commit.step < next_step]

    def transition_folder(self, step: int, epoch: int) -> str:
        """Return where `write_transition_set` writes."""
        return self._sets.folder(step, epoch)

    def write_transition_set(
        self, step: int, epoch: int, group: str, on_record: Callable[[ShardRecord], None]
    ) -> tuple[ShardRecord, ...]:
        """Have a group's live state written into a set for one change of the plan, and return its records.

        Several groups may be written at the same time, and beside a pending commit. It is committed by its manifest
        and named in no journal; `discard_transition_sets` removes it.

        Args:
            step: the one that begins at the boundary.
            epoch: of the attempt; each set has one of its own.
            group: the model-stage.
            on_record: called by this thread for each shard as it completes.

        Raises:
            OSError: it could not be written.
            FencedOff: another driver has taken the run over.
        """
        self._check()
        if self._queue is not None and self._queue.has_copies(group):
            self.wait()  # workers would take the copies for what is to be written now
        return self._sets.write(step, epoch, group, self._orders, on_record)

    def discard_transition_sets(self) -> None:
        """Remove all sets that `write_transition_set` has written or given up."""
        self._sets.discard()

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
        self._sets.stop()

    def retire(self, also_kept: Collection[str] = ()) -> None:
        """Remove, at a session's start, the sets that nobody needs: of older commits, and of whoever was killed."""
        self._retire(also_kept, transitions=True)

    def _retire(self, also_kept: Collection[str] = (), *, transitions: bool = False) -> None:
        keep = {*also_kept, *self._doubtful, *(commit.set_name for commit in self._commits[-self._keep :])}
        try:
            number = self._owner.number
            retire(self._root, keep=keep, lease_s=self._lease_s, take_over=number, transitions=transitions)
        except Exception as error:  # every store has errors of its own
            where = hide_credentials(self._root)
            logger.warning("Old staged state in %s can't be removed (%s).", where, describe_error(error))

    def _check(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        if self._closed:
            raise RuntimeError("the run is being stopped.")

    # The thread

    def _commit(self, shards: ShardQueue, pending: _Pending, run_state: dict[str, Any], plan: dict[str, Any]) -> None:
        """Write all shards of one step and commit them; a failure is warned of, and the run goes on without."""
        step, name = pending.step, pending.name
        try:
            records = shards.write_all()
            manifest = Manifest(self._run_id, step, run_state, plan, records)
            checksum = tried(lambda: self._write_manifest(name, manifest))
            body = {"step": step, "set": name, "manifest": checksum, **pending.notes}
            self._doubtful.append(name)
            entry = tried(lambda: self._owner.journal.append("commit", body))
            self._take_note(Commit.of(entry))
            pending.feed.end(None)
        except Exception as error:  # every store has errors of its own
            self._fenced = error if isinstance(error, FencedOff) else self._find_successor()
            if self._fenced is not None:
                pending.feed.end(self._fenced)
                self._discard(name)
                return
            self._warn(step, error)
            pending.feed.end(error)
            if not self._closed:
                shards.drain()
        finally:
            pending.feed.end(ShardFailed("the thread that commits has ended"))  # whatever happens, nobody waits on
        if not self._closed:
            self._retire()

    def _find_successor(self) -> FencedOff | None:
        """Return that another driver has taken over, if one has: it removes what is half written here."""
        try:
            self._owner.check()
        except FencedOff as error:
            return error
        except Exception:  # a store that fails says nothing of drivers
            return None
        return None

    def _write_manifest(self, name: str, manifest: Manifest) -> str:
        folder = join_url(self._root, name)
        try:
            return commit_state(folder, manifest)
        except FileExistsError:
            # The run has been at this step before and went back: the shards of that attempt are overwritten by now.
            remove_file(join_url(folder, MANIFEST_NAME))
            return commit_state(folder, manifest)

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

    def _warn(self, step: int, error: Exception) -> None:
        back = f"step {self.newest.step}" if self.newest is not None else "the start"
        logger.warning(
            "The state of step %d was not staged (%s); the run goes on, and a resume would begin after %s.",
            step,
            describe_error(error),
            back,
        )
