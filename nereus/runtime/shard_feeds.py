"""Records of shards on their way to a worker that reads a set while it is written, in whatever order they come."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nereus.runtime.communicator import CommunicatorAborted
from storage.manifest import ShardRecord

_POLL_S = 0.1
_LIMIT_S = 600.0


@dataclass(frozen=True)
class FeedEnd:
    """No more is coming.

    Attributes:
        num_shards: that the set has in all; it may overtake the last of their records.
        failure: why the set will never be complete.
    """

    num_shards: int = 0
    failure: str | None = None


class ShardFeeds:
    """Hands records from the threads that hear of them to the one that reads, by the name of the feed."""

    def __init__(self) -> None:
        self._queues: dict[str, queue.SimpleQueue[ShardRecord | FeedEnd]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def put(self, feed: str, item: ShardRecord | FeedEnd) -> None:
        """Take in the next record or the end; perhaps before anybody reads."""
        self._queue(feed).put(item)

    def records(self, feed: str, check: Callable[[], None]) -> Iterator[ShardRecord]:
        """Yield the records of all shards of a set as they come.

        Args:
            check: called now and then while nothing comes; what it raises ends the wait.

        Raises:
            CommunicatorAborted: the set will never be complete.
            RuntimeError: nothing came for too long.
        """
        waiting, num_records, num_shards = self._queue(feed), 0, None
        deadline = time.monotonic() + _LIMIT_S
        while num_records != num_shards:
            check()
            try:
                item = waiting.get(timeout=_POLL_S)
            except queue.Empty:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{feed} waited in vain for shards, {_LIMIT_S:g} s") from None
                continue
            deadline = time.monotonic() + _LIMIT_S
            if not isinstance(item, FeedEnd):
                num_records += 1
                yield item
            elif item.failure is not None:
                raise CommunicatorAborted(f"the staged set will not be complete: {item.failure}")
            else:
                num_shards = item.num_shards

    def clear(self) -> None:
        """Forget all feeds."""
        with self._lock:
            self._queues.clear()

    def _queue(self, feed: str) -> queue.SimpleQueue[ShardRecord | FeedEnd]:
        with self._lock:
            return self._queues[feed]
