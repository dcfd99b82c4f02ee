"""The shards of one commit on their way: which wait, which are under way, which are written, and which must hurry.

One thread runs `write_all`; others say with `make_way` that an update is due, and wait there until it can do no harm.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from nereus.limits import REMOTE_SHARD_BYTES, REMOTE_SHARDS_IN_FLIGHT, SHARDS_IN_FLIGHT
from nereus.runtime.engine import CommandFailed, Engine, WorkerLost
from nereus.staged_state import ShardOrder
from storage.manifest import ShardRecord
from storage.urls import local_path

# What fails this often ends the commit.
MOST_TRIES = 3


_RETRY_WAIT_S = 0.5
T = TypeVar("T")


class ShardFailed(OSError):
    """A shard could not be written; the text says where and why."""


def tried(action: Callable[[], T]) -> T:
    """Return what `action` returns, called again after an error of the store."""
    for _ in range(MOST_TRIES - 1):
        try:
            return action()
        except OSError:
            time.sleep(_RETRY_WAIT_S)
    return action()


@dataclass(frozen=True)
class _Sent:
    """A command under way: one shard to write, or shards to copy."""

    device: int
    orders: tuple[ShardOrder, ...]
    is_copy: bool


class ShardQueue:
    """Has the workers of an engine write the shards of one set."""

    def __init__(
        self,
        engine: Engine,
        folder: str,
        orders: Mapping[int, Sequence[ShardOrder]],
        spare_bytes: Mapping[int, int],
        *,
        shards_in_flight: int,
        bytes_in_flight: int | None = None,
        on_record: Callable[[ShardRecord], None] = lambda record: None,
    ) -> None:
        """Describe the work.

        Args:
            folder: of the set, any fsspec URL.
            orders: per device what its worker writes; it holds the same orders.
            spare_bytes: per device what copies of unwritten shards may take.
            shards_in_flight: most shards that a worker writes at the same time.
            bytes_in_flight: most bytes of them, unless one alone has more; None where they take no memory.
            on_record: called by the thread that runs `write_all` for each shard as it completes.
        """
        self._on_record = on_record
        self._bytes_in_flight = bytes_in_flight
        self._engine, self._folder, self._shards_in_flight = engine, folder, shards_in_flight
        self._waiting = {device: deque(given) for device, given in orders.items()}
        self._room = dict(spare_bytes)
        self._order = [order.file for given in orders.values() for order in given]
        self._at_risk: dict[str, set[str]] = {}  # per group the files that an update would spoil
        for order in (order for given in orders.values() for order in given):
            self._at_risk.setdefault(order.group, set()).add(order.file)
        self._due: set[str] = set()
        self._events: queue.SimpleQueue[Future | str | None] = queue.SimpleQueue()
        self._sent: dict[Future, _Sent] = {}
        self._writing: Counter[int] = Counter()
        self._writing_bytes: Counter[int] = Counter()
        self._tries: Counter[str] = Counter()
        self._records: dict[str, ShardRecord] = {}
        self._changed = threading.Condition()
        self._ended = False

    @classmethod
    def at(
        cls,
        folder: str,
        engine: Engine,
        orders: Mapping[int, Sequence[ShardOrder]],
        spare_bytes: Mapping[int, int],
        on_record: Callable[[ShardRecord], None],
    ) -> Self:
        """Return a queue for a set with as much under way as suits the store where it lies."""
        is_remote = local_path(folder) is None
        return cls(
            engine,
            folder,
            orders,
            spare_bytes,
            shards_in_flight=REMOTE_SHARDS_IN_FLIGHT if is_remote else SHARDS_IN_FLIGHT,
            bytes_in_flight=REMOTE_SHARDS_IN_FLIGHT * REMOTE_SHARD_BYTES if is_remote else None,
            on_record=on_record,
        )

    def write_all(self) -> tuple[ShardRecord, ...]:
        """Write all shards; returns when every one is complete in the folder.

        Raises:
            ShardFailed: a shard failed again and again, its worker was lost, or `stop` was called.
        """
        try:
            while len(self._records) < len(self._order):
                for device in self._waiting:
                    self._submit(device)
                event = self._events.get()
                if event is None:
                    raise ShardFailed("there was no time left")
                if isinstance(event, str):
                    self._hurry(event)
                else:
                    self._take(event)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
        return tuple(self._records[file] for file in self._order)

    def make_way(self, group: str) -> None:
        """Return when updates of a group can't spoil a shard any more: all are written or copied, or given up."""
        with self._changed:
            if self._at_risk.get(group):
                self._events.put(group)
                self._changed.wait_for(lambda: self._ended or not self._at_risk[group])

    def stop(self) -> None:
        """Make `write_all` give up."""
        self._events.put(None)

    def has_copies(self, group: str) -> bool:
        """Return whether workers may hold copies of shards of a group: of a state that updates have changed since."""
        return group in self._due

    def rest(self) -> None:
        """Wait until no worker is busy with this any more; after a failure."""
        for future in self._sent:
            future.exception()

    def drain(self) -> None:
        """Wait until no worker is busy with this any more, and free the copies; after a failure."""
        self.rest()
        frees = [self._engine.submit_beside(device, "drop_shard_copies") for device in self._waiting]
        for future in frees:
            future.exception()

    def _submit(self, device: int) -> None:
        """Keep a worker busy."""
        waiting = self._waiting[device]
        while waiting and self._may_begin(device, waiting[0]):
            order = waiting.popleft()
            self._writing[device] += 1
            self._writing_bytes[device] += order.num_bytes
            self._send(_Sent(device, (order,), False), "write_shard", folder=self._folder, file=order.file)

    def _may_begin(self, device: int, order: ShardOrder) -> bool:
        if self._writing[device] == 0 or self._bytes_in_flight is None:
            return self._writing[device] < self._shards_in_flight
        fits = self._writing_bytes[device] + order.num_bytes <= self._bytes_in_flight
        return fits and self._writing[device] < self._shards_in_flight

    def _send(self, sent: _Sent, method: str, **arguments: Any) -> None:
        future = self._engine.submit_beside(sent.device, method, **arguments)
        self._sent[future] = sent
        future.add_done_callback(self._events.put)

    def _hurry(self, group: str) -> None:
        """An update of `group` is due: have its waiting shards copied while there is room, and write the rest first."""
        self._due.add(group)
        for device, waiting in self._waiting.items():
            mine = [order for order in waiting if order.file in self._at_risk[group]]
            copied: list[ShardOrder] = []
            while mine and mine[-1].num_bytes <= self._room.get(device, 0):
                copied.append(mine.pop())
                self._room[device] -= copied[-1].num_bytes
            for order in [*copied, *mine]:
                waiting.remove(order)
            waiting.extendleft(reversed(mine))
            if copied:  # they wait again when they are copied: a file written meanwhile would be from live tensors
                files = [order.file for order in copied]
                self._send(_Sent(device, tuple(copied), True), "preserve_shards", files=files)

    def _take(self, future: Future) -> None:
        """Take note of the end of a command."""
        sent = self._sent.pop(future)
        error = future.exception()
        if isinstance(error, WorkerLost):
            raise ShardFailed(str(error))
        assert error is None or isinstance(error, CommandFailed), f"engine failed with {error!r}"
        if sent.is_copy:
            if error is None:
                self._is_safe(sent.orders)
                self._waiting[sent.device].extend(sent.orders)
            else:  # such as for want of memory: the update waits until they are written
                self._waiting[sent.device].extendleft(sent.orders)
            return
        (order,) = sent.orders
        self._writing[sent.device] -= 1
        self._writing_bytes[sent.device] -= order.num_bytes
        if error is None:
            self._records[order.file] = future.result()
            self._is_safe(sent.orders)
            self._on_record(self._records[order.file])
            return
        self._tries[order.file] += 1
        if self._tries[order.file] >= MOST_TRIES:
            raise ShardFailed(f"{order.file} of device {sent.device}: {error.message}")
        put_back = (
            self._waiting[sent.device].appendleft if order.group in self._due else self._waiting[sent.device].append
        )
        put_back(order)

    def _is_safe(self, orders: Sequence[ShardOrder]) -> None:
        with self._changed:
            for order in orders:
                self._at_risk[order.group].discard(order.file)
            self._changed.notify_all()
