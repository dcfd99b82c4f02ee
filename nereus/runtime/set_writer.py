"""Sets that a change of the plan stages for itself: committed by their manifest, never named in the journal.

They lie beside the commits as `transition-<step>-<take-over>.<epoch>`, are no points to resume at, and go at its end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from nereus.runtime.engine import Engine
from nereus.runtime.shard_queue import ShardFailed, ShardQueue, tried
from nereus.staged_state import ShardOrder
from storage.errors import describe_error, hide_credentials
from storage.manifest import Manifest, ShardRecord
from storage.retention import discard_set
from storage.state import commit_state
from storage.urls import join_url

logger = logging.getLogger(__name__)


class TransitionSetWriter:
    """Writes and removes the sets of transitions; groups on different devices may be written at the same time."""

    def __init__(self, engine: Engine, root: str, *, run_id: str, take_over: int) -> None:
        self._engine, self._root, self._run_id, self._take_over = engine, root, run_id, take_over
        self._lock = threading.Lock()
        self._device_locks: dict[int, threading.Lock] = {}
        self._under_way: dict[str, ShardQueue] = {}
        self._left: list[str] = []  # written, or given up, and not removed yet
        self._stopped = False

    def folder(self, step: int, epoch: int) -> str:
        """Return where the set of an attempt lies."""
        return join_url(self._root, _name(step, self._take_over, epoch))

    def write(
        self,
        step: int,
        epoch: int,
        group: str,
        orders: Mapping[int, Sequence[ShardOrder]],
        on_record: Callable[[ShardRecord], None],
    ) -> tuple[ShardRecord, ...]:
        """Have a group written from its live tensors, commit the set, and return its records.

        Args:
            step: the one that begins at the boundary.
            epoch: of the attempt; each set has one of its own.
            group: the model-stage.
            orders: per device all that it writes; its worker holds the same.
            on_record: called by this thread for each shard as it completes.

        Raises:
            OSError: it could not be written, a worker was lost, or `stop` was called.
        """
        mine = {device: [order for order in given if order.group == group] for device, given in orders.items()}
        mine = {device: given for device, given in sorted(mine.items()) if given}
        assert mine, f"no device writes {group}"
        name, folder = _name(step, self._take_over, epoch), self.folder(step, epoch)
        shards = ShardQueue.at(folder, self._engine, mine, {}, on_record)
        with self._lock:
            if self._stopped:
                raise ShardFailed("the run is being stopped")
            self._under_way[name] = shards
            locks = [self._device_locks.setdefault(device, threading.Lock()) for device in mine]
        try:
            with ExitStack() as stack:
                for lock in locks:  # in ascending order; what a worker holds of shards on their way stays bounded
                    stack.enter_context(lock)
                records = self._write_all(shards)
            tried(lambda: commit_state(folder, Manifest(self._run_id, step, {}, {}, records)))
            return records
        finally:
            with self._lock:
                del self._under_way[name]
                self._left.append(name)

    def _write_all(self, shards: ShardQueue) -> tuple[ShardRecord, ...]:
        try:
            return shards.write_all()
        except BaseException:
            if not self._stopped:  # what is still under way would come back into a folder that is removed
                shards.rest()
            raise

    def discard(self) -> None:
        """Remove all sets that are not being written; what a store doesn't let go is tried again the next time."""
        with self._lock:
            names, self._left = self._left, []
        for name in names:
            try:
                discard_set(self._root, name)
            except Exception as error:  # every store has errors of its own
                logger.warning("%s of %s stays (%s).", name, hide_credentials(self._root), describe_error(error))
                with self._lock:
                    self._left.append(name)

    def stop(self) -> None:
        """Make every `write` give up."""
        with self._lock:
            self._stopped = True
            for shards in self._under_way.values():
                shards.stop()


def _name(step: int, take_over: int, epoch: int) -> str:
    return f"transition-{step:08d}-{take_over}.{epoch}"
