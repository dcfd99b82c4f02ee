"""How fast staged state is written and read at a place, within a time limit: a few MiB by the shards' own code."""

from __future__ import annotations

import contextlib
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from nereus.cluster import Link
from nereus.limits import REMOTE_SHARDS_IN_FLIGHT, RESTORE_BUFFER_BYTES, SHARDS_IN_FLIGHT
from nereus.runtime.pages import new_tensors
from nereus.runtime.worker import trim_heap
from storage.exclusive import create_exclusively
from storage.shard_record import ShardRecord
from storage.shard_writer import ShardWriter
from storage.slices import TensorSlice, whole
from storage.small_files import list_names, remove_files, remove_folder
from storage.state_reader import StateReader
from storage.urls import join_url, local_path

T = TypeVar("T")

_GROUP = "probe"
_REPEATS = 3
# A place where one turn takes longer than this is measured once.
_ENOUGH_S = 0.1
_SMALL = torch.ones(16)


@dataclass(frozen=True)
class StorageSpeeds:
    """Of one device. A message is a shard, or a call of the reader.

    Attributes:
        record_s: for a small file created whole.
        read_cores_bytes_s: what its cores would read with nothing to wait for.
        shared: by what part of the shorter of the two it takes longer than the longer one to write and to read at the
            same time; 0 to 1.
    """

    write: Link
    read: Link
    record_s: float
    read_cores_bytes_s: float
    shared: float


def probe_storage(folder: str, tensors: Sequence[Tensor], limit_s: float) -> StorageSpeeds:
    """Write and read shards in a new folder and remove it.

    It ends after `limit_s` seconds at most, whatever the place does: what has not ended by then (or has failed) counts
    as if it had taken all that time. What hangs is removed by a thread that stays behind.
    """
    turns = _Turns(folder, [tensor.cpu() for tensor in tensors])
    began = time.perf_counter()
    thread = threading.Thread(target=turns.run, name="storage-probe", daemon=True)
    thread.start()
    thread.join(limit_s)
    passed = limit_s if thread.is_alive() else time.perf_counter() - began
    return turns.speeds(max(passed, 1e-6) if not turns.failed else limit_s)


class _Turns:
    """What a thread does at the place, and how long each part took so far."""

    def __init__(self, folder: str, tensors: Sequence[Tensor]) -> None:
        streams = SHARDS_IN_FLIGHT if local_path(folder) is not None else REMOTE_SHARDS_IN_FLIGHT
        self._folder = folder
        self._shards = [list(tensors[number::streams]) or [tensors[0]] for number in range(streams)]
        self._seconds: dict[str, list[float]] = {}
        self._cpu_seconds: list[float] = []  # of reading
        self.failed = False

    def run(self) -> None:
        try:
            for turn in range(_REPEATS):
                begun = time.perf_counter()
                self._turn(turn)
                if time.perf_counter() - begun > _ENOUGH_S:
                    break
        except Exception:  # every store has errors of its own; that this place is of no use is all that matters here
            self.failed = True
        finally:
            with contextlib.suppress(Exception):
                remove_files([join_url(self._folder, name) for name in list_names(self._folder)])
                remove_folder(self._folder)

    def _turn(self, turn: int) -> None:
        name = f"{turn}.json"
        self._time("record", lambda: create_exclusively(join_url(self._folder, name), b"{}"))
        small = self._time("small write", lambda: _write(self._folder, f"small-{turn}", [[_SMALL]]))
        large = self._time("write", lambda: _write(self._folder, f"large-{turn}", self._shards))
        trim_heap()  # what is read goes to new memory
        self._time("small read", lambda: _read(self._folder, small, [[_SMALL]]))
        begun = time.process_time()
        self._time("read", lambda: _read(self._folder, large, self._shards))
        self._cpu_seconds.append(time.process_time() - begun)
        self._time("both", lambda: self._write_and_read(f"more-{turn}", large))

    def _write_and_read(self, name: str, written: Sequence[ShardRecord]) -> None:
        write, read = partial(_write, self._folder, name), partial(_read, self._folder)
        _at_once([lambda: write(self._shards), lambda: read(written, self._shards)])

    def _time(self, part: str, call: Callable[[], T]) -> T:
        begun = time.perf_counter()
        result = call()
        self.take(part, time.perf_counter() - begun)
        return result

    def take(self, part: str, seconds: float) -> None:
        """Take note of what a part of a turn took."""
        self._seconds.setdefault(part, []).append(seconds)

    def speeds(self, limit_s: float) -> StorageSpeeds:
        """Return what is known; what isn't took `limit_s`."""
        seconds = {part: statistics.median(found) for part, found in self._seconds.copy().items() if found}
        num_bytes = sum(tensor.nbytes for shard in self._shards for tensor in shard)

        def link(part: str) -> Link:
            whole_s = seconds.get(part, limit_s)
            small_s = min(seconds.get(f"small {part}", limit_s), whole_s / 2)
            return Link(num_bytes / max(whole_s - small_s, 1e-9), small_s)

        shorter_s, longer_s = sorted(seconds.get(part, limit_s) for part in ("write", "read"))
        longer_by = (seconds.get("both", shorter_s + longer_s) - longer_s) / max(shorter_s, 1e-9)
        cpu_s = statistics.median(self._cpu_seconds or [limit_s])
        return StorageSpeeds(
            link("write"),
            link("read"),
            seconds.get("record", limit_s),
            read_cores_bytes_s=num_bytes / max(cpu_s, 1e-9) * torch.get_num_threads(),
            shared=min(1.0, max(0.0, longer_by)),
        )


def _write(folder: str, name: str, shards: Sequence[Sequence[Tensor]]) -> list[ShardRecord]:
    """Write some shards, all at the same time."""

    def write(number: int, tensors: Sequence[Tensor]) -> ShardRecord:
        writer = ShardWriter(folder, group=_GROUP, file=f"{name}-{number}.safetensors")
        for index, tensor in enumerate(tensors):
            part = _part(number, index, tensor)
            writer.add(part, part.sizes, tensor)
        return writer.finish_shard()

    return _at_once([partial(write, number, tensors) for number, tensors in enumerate(shards)])


def _at_once(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make some calls at the same time, on threads that nobody waits for at the process's end; return their results."""
    done: queue.SimpleQueue[tuple[T, None] | tuple[None, Exception]] = queue.SimpleQueue()

    def run(call: Callable[[], T]) -> None:
        try:
            done.put((call(), None))
        except Exception as error:
            done.put((None, error))

    for call in calls:
        threading.Thread(target=run, args=(call,), daemon=True).start()
    results = [done.get() for _ in calls]
    error = next((error for _, error in results if error is not None), None)
    if error is not None:
        try:
            raise error
        finally:
            del results, error  # else they hold each other, and what was being written or read, for a while
    return [cast(T, result) for result, _ in results]


def _read(folder: str, records: Sequence[ShardRecord], shards: Sequence[Sequence[Tensor]]) -> None:
    """Read the shards of `_write` into new memory."""
    parts = [_part(number, index, tensor) for number, held in enumerate(shards) for index, tensor in enumerate(held)]
    first = shards[0][0]
    made = new_tensors({part: part.sizes for part in parts}, first.dtype, first.device)
    wanted = list(made.items())
    reader = StateReader(folder, _GROUP, wanted, buffer_bytes=RESTORE_BUFFER_BYTES)
    try:
        for record in records:
            reader.feed(record)
        reader.finish()
    finally:
        reader.close()


def _part(number: int, index: int, tensor: Tensor) -> TensorSlice:
    return whole(f"tensor{number}.{index}", tuple(tensor.shape))
