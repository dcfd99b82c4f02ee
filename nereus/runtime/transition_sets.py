"""The staged sets of one transition: which set a `restore` reads, who writes it, and how its records get there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from nereus.plan import stage_of
from nereus.runtime.engine import Engine
from nereus.runtime.model_stages import next_epoch
from nereus.runtime.shard_feeds import FeedEnd
from nereus.runtime.sources import ModelSource
from nereus.runtime.staging import Staging
from nereus.runtime.transition_orders import RestoreOrder
from nereus.transition.local import GENERATION, TRAINING
from nereus.transition.primitives import Primitive, TransitionGraph
from storage.manifest import Manifest, ShardRecord

_CHECK_S = 0.2
_WAIT_LIMIT_S = 600.0


class TransitionSets:
    """Sets that hold the state of one boundary: its commit, done or under way, or one written for the move alone."""

    def __init__(
        self,
        engine: Engine,
        staging: Staging,
        graph: TransitionGraph,
        sources: Mapping[str, ModelSource],
        *,
        step: int,
        committed: tuple[str, Manifest] | None,
    ) -> None:
        """Describe what there is; nothing is read or written yet.

        Args:
            step: the one that begins at the boundary.
            committed: folder and manifest of the boundary's commit, where it has ended already.
        """
        self._engine, self._staging, self._sources, self._step = engine, staging, sources, step
        self._attempt = next_epoch()
        self._orders: dict[str, RestoreOrder] = {}
        self._readers: dict[str, list[Primitive]] = {}
        for primitive in graph.primitives:
            for stage in primitive.streams:
                self._readers.setdefault(stage, []).append(primitive)
        if committed is not None:
            folder, manifest = committed
            for group in {shard.group for shard in manifest.shards}:
                self._orders[group] = RestoreOrder(group, folder, manifest.shards_of(group))

    def restore_order(self, primitive: Primitive) -> RestoreOrder:
        """Return what the devices of a `restore` read; where a set is still being written, its records follow."""
        name = primitive.model_stage
        if stage_of(name) == "inference":
            return RestoreOrder(source=self._sources[name])
        order = self._orders[_group_of(name)]
        # Its records go to the readers that were announced, from the first on; one that isn't gets them all at once.
        return replace(order, shards=(), feed=self._feed_of(primitive)) if primitive.streams else order

    def stage(self, primitive: Primitive, on_start: Callable[[], None]) -> int:
        """Have a model-stage's state written, or follow the commit that writes it; return the bytes written for this.

        Args:
            on_start: called when readers may start.

        Raises:
            OSError: the set could not be written.
        """
        group = primitive.model_stage
        if primitive.bytes:
            return self._write(primitive, group, on_start)
        self._follow(primitive, group, on_start)
        return 0

    def _write(self, primitive: Primitive, group: str, on_start: Callable[[], None]) -> int:
        epoch = next_epoch()
        folder = self._staging.transition_folder(self._step, epoch)
        self._orders[group] = RestoreOrder(group, folder)
        on_start()
        records = self._staging.write_transition_set(
            self._step, epoch, group, lambda record: self._feed(primitive, record)
        )
        self._orders[group] = RestoreOrder(group, folder, tuple(records))
        self._feed(primitive, FeedEnd(len(records)))
        return sum(piece.stop - piece.start for record in records for piece in record.pieces)

    def _follow(self, primitive: Primitive, group: str, on_start: Callable[[], None]) -> None:
        records: list[ShardRecord] = []
        ended: list[Exception | None] = []
        done = threading.Event()

        def take(record: ShardRecord | None, error: Exception | None) -> None:
            if record is None:
                ended.append(error)
                done.set()
            elif record.group == group:
                records.append(record)
                self._feed(primitive, record)

        folder = self._staging.follow(take)
        self._orders[group] = RestoreOrder(group, folder)
        on_start()
        self.wait_for(done.wait, "the pending commit to end")
        if ended[0] is not None:
            raise OSError(f"the commit that {group} was to be read from failed: {ended[0]}") from ended[0]
        self._orders[group] = RestoreOrder(group, folder, tuple(records))
        self._feed(primitive, FeedEnd(len(records)))

    def wait_pending(self) -> None:
        """Return when no commit writes from units that are about to be freed."""
        self.wait_for(self._staging.wait, "the pending commit to end")

    def wait_for(self, happens: Callable[[float], bool], what: str) -> None:
        """Return when something has happened; `happens(seconds)` waits so long and tells whether it has.

        Raises:
            OSError: the engine is broken, or it takes too long.
        """
        deadline = time.monotonic() + _WAIT_LIMIT_S
        while not happens(_CHECK_S):
            if self._engine.broken is not None or time.monotonic() > deadline:
                raise OSError(self._engine.broken or f"waited in vain for {what}, {_WAIT_LIMIT_S:g} s")

    def fail(self, primitive: Primitive, error: Exception) -> None:
        """Tell the readers of a set that it will never be complete."""
        self._feed(primitive, FeedEnd(failure=str(error) or type(error).__name__))

    def _feed(self, primitive: Primitive, item: ShardRecord | FeedEnd) -> None:
        for reader in self._readers.get(primitive.id, ()):
            for device in reader.devices:
                self._engine.submit_beside(device, "feed_shard", feed=self._feed_of(reader), item=item)

    def _feed_of(self, reader: Primitive) -> str:
        """Return the name of what a primitive reads: what comes late for another attempt's namesake is not for it."""
        return f"{reader.id} of attempt {self._attempt}"

    def discard(self) -> None:
        """Remove what was written for this transition alone."""
        self._staging.discard_transition_sets()


def _group_of(model_stage: str) -> str:
    """Return the group of staged tensors that a model-stage is read from."""
    return TRAINING if model_stage == GENERATION else model_stage
