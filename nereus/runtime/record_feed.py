"""The records of a set that is being written, for those who read it meanwhile: all so far, then each new one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from storage.manifest import ShardRecord

logger = logging.getLogger(__name__)

Follower = Callable[[ShardRecord | None, Exception | None], None]


class RecordFeed:
    """Passes records on, in order; thread-safe. It ends once: the set is committed, or it never will be."""

    def __init__(self) -> None:
        self._records: list[ShardRecord] = []
        self._followers: list[Follower] = []
        self._lock = threading.RLock()  # held during calls, so that each follower gets everything once and in order
        self._ended = False
        self._error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self._ended

    def put(self, record: ShardRecord) -> None:
        """Pass on the record of a shard that is complete."""
        with self._lock:
            assert not self._ended, "the feed has ended"
            self._records.append(record)
            self._tell(self._followers, record, None)

    def end(self, error: Exception | None) -> None:
        """Pass on that the set is committed, or why it never will be; only the first call counts."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._tell(self._followers, None, error)

    def follow(self, follower: Follower) -> None:
        """Call `follower(record, None)` for all records so far and to come, then `(None, None)` or `(None, error)`.

        It is called by this thread for what has happened, and by the one that writes for what comes.
        """
        with self._lock:
            self._followers.append(follower)
            for record in self._records:
                self._tell([follower], record, None)
            if self._ended:
                self._tell([follower], None, self._error)

    def _tell(self, followers: list[Follower], record: ShardRecord | None, error: Exception | None) -> None:
        for follower in list(followers):
            try:
                follower(record, error)
            except Exception:  # it must not end the commit that it reads along with
                logger.exception("Who reads along with a commit failed; it gets nothing more.")
                if follower in self._followers:
                    self._followers.remove(follower)
