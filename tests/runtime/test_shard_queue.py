"""Shards on their way, with workers of paper: order, retries, copies for updates that are due, and giving up."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from nereus.limits import REMOTE_SHARD_BYTES, REMOTE_SHARDS_IN_FLIGHT, SHARDS_IN_FLIGHT
from nereus.runtime.engine import CommandFailed, Engine, WorkerLost
from nereus.runtime.shard_queue import MOST_TRIES, ShardFailed, ShardQueue
from nereus.staged_state import ShardOrder
from storage.manifest import ShardRecord
from storage.slices import TensorSlice

IN_FLIGHT = 2
GROUPS = ("actor.training", "critic.training")


class PaperEngine(Engine):
    """Keeps what it was told beside the steps; the test ends each command by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[int, str, dict[str, Any], Future]] = []
        self.arrived = threading.Condition()

    def submit_beside(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Keep the command."""
        future: Future = Future()
        with self.arrived:
            self.sent.append((device, method, kwargs, future))
            self.arrived.notify_all()
        return future

    def take(self, count: int = 1, timeout_s: float = 10.0) -> list[tuple[int, str, dict[str, Any], Future]]:
        """Wait for the next commands and return them."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.sent) >= count, timeout_s), self.sent
            taken, self.sent = self.sent[:count], self.sent[count:]
            return taken

    def submit(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Nothing of a step comes here."""
        raise NotImplementedError

    def start(self, device_ids: Sequence[int]) -> None:
        """Nothing to start."""

    def release(self, device_ids: Collection[int]) -> None:
        """Nothing to stop."""

    def recover(self, timeout_s: float = 10.0, *, step: int | None = None, may_shrink: bool = False) -> tuple[int, ...]:
        return ()

    def pids(self) -> dict[int, int]:
        """No process."""
        return {}

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing to free."""


def order(device: int, number: int, group: str = "actor.training", num_bytes: int = 10) -> ShardOrder:
    return ShardOrder(
        group, device, f"{group}-{device}-{number}.safetensors", (TensorSlice("w", (0,), (1,)),), num_bytes
    )


def start(engine: Engine, orders: dict[int, list[ShardOrder]], spare_bytes: dict[int, int]) -> ShardQueue:
    return ShardQueue(engine, "folder", orders, spare_bytes, shards_in_flight=IN_FLIGHT)


def record(file: str) -> ShardRecord:
    return ShardRecord(file.partition("-")[0], file, 1, "", {}, ())


def finish(command: tuple[int, str, dict[str, Any], Future]) -> str:
    _, method, kwargs, future = command
    future.set_result(record(kwargs["file"]) if method == "write_shard" else None)
    return kwargs.get("file", method)


def fail(command: tuple[int, str, dict[str, Any], Future]) -> None:
    device, _, _, future = command
    future.set_exception(CommandFailed(device, "OSError", "No space left on device", ""))


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def test_each_device_has_a_few_shards_under_way_and_the_records_come_in_order(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    orders = {0: [order(0, n) for n in range(4)], 3: [order(3, 0)]}
    written = pool.submit(start(engine, orders, {}).write_all)
    first = engine.take(IN_FLIGHT + 1)
    assert [command[0] for command in first] == [0, 0, 3] and not engine.sent
    assert {command[2]["folder"] for command in first} == {"folder"}
    for command in reversed(first):
        finish(command)
    for command in engine.take(2):
        finish(command)
    assert [r.file for r in written.result(10)] == [o.file for given in orders.values() for o in given]


@pytest.mark.parametrize(
    ("folder", "in_flight"), [("/disk/set", SHARDS_IN_FLIGHT), ("s3://bucket/set", REMOTE_SHARDS_IN_FLIGHT)]
)
def test_a_store_decides_how_much_is_under_way_and_each_record_is_told(
    pool: ThreadPoolExecutor, folder: str, in_flight: int
) -> None:
    engine = PaperEngine()
    told: list[str] = []
    orders = {0: [order(0, n, num_bytes=REMOTE_SHARD_BYTES) for n in range(in_flight + 1)]}
    shards = ShardQueue.at(folder, engine, orders, {}, lambda record: told.append(record.file))
    written = pool.submit(shards.write_all)
    under_way = engine.take(in_flight)
    assert not engine.sent and not told
    last, *others = [finish(command) for command in reversed(under_way)]
    finish(*engine.take(1))
    assert len(written.result(10)) == in_flight + 1
    assert told[:in_flight] == [last, *others] and len(told) == in_flight + 1


def test_a_shard_that_a_reader_cannot_be_told_of_ends_it(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()

    def refuse(record: ShardRecord) -> None:
        raise ValueError(record.file)

    written = pool.submit(ShardQueue.at("/disk", engine, {0: [order(0, 0)]}, {}, refuse).write_all)
    file = finish(*engine.take(1))
    with pytest.raises(ValueError, match=file):
        written.result(10)


def test_shards_that_take_memory_are_bounded_by_their_bytes(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    orders = {0: [order(0, n, num_bytes=size) for n, size in enumerate((30, 30, 60, 200, 10))]}
    shards = ShardQueue(engine, "folder", orders, {}, shards_in_flight=4, bytes_in_flight=100)
    written = pool.submit(shards.write_all)
    for count in (2, 1, 1, 1):  # 30 + 30, 60, 200 alone, 10
        under_way = engine.take(count)
        assert not engine.sent
        for command in under_way:
            finish(command)
    written.result(10)


def test_a_shard_is_tried_again_and_then_given_up(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    written = pool.submit(start(engine, {0: [order(0, 0)]}, {}).write_all)
    for _ in range(MOST_TRIES):
        fail(*engine.take())
    with pytest.raises(ShardFailed, match=r"actor.training-0-0.safetensors of device 0: No space left on device"):
        written.result(10)


def test_one_failure_is_mended_by_another_try(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    written = pool.submit(start(engine, {0: [order(0, 0)]}, {}).write_all)
    fail(*engine.take())
    finish(*engine.take())
    assert len(written.result(10)) == 1


def test_a_lost_worker_ends_it_at_once(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    written = pool.submit(start(engine, {0: [order(0, n) for n in range(5)]}, {}).write_all)
    engine.take()[0][3].set_exception(WorkerLost(0, "exited with signal 9 (SIGKILL)"))
    with pytest.raises(ShardFailed, match="device 0 was lost"):
        written.result(10)


def test_an_update_waits_for_shards_under_way_and_has_the_rest_copied(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    orders = {0: [*(order(0, n) for n in range(4)), order(0, 0, "critic.training")]}
    shards = start(engine, orders, {0: 1000})
    written = pool.submit(shards.write_all)
    under_way = engine.take(IN_FLIGHT)
    update = pool.submit(shards.make_way, "actor.training")
    (copy,) = engine.take()
    assert copy[1] == "preserve_shards"
    assert set(copy[2]["files"]) == {o.file for o in orders[0][IN_FLIGHT:4]}
    finish(copy)
    assert not update.done()
    for command in under_way:
        finish(command)
    update.result(10)
    assert not written.done()
    pool.submit(shards.make_way, "actor.training").result(10)  # nothing is at risk any more
    rest = [finish(*engine.take()) for _ in range(3)]
    assert sorted(rest) == sorted(o.file for o in orders[0][IN_FLIGHT:])
    written.result(10)


def test_what_is_being_copied_is_not_written_meanwhile(pool: ThreadPoolExecutor) -> None:
    """It would be read from the live tensors, and still be under way when the copy lets the update begin."""
    engine = PaperEngine()
    shards = start(engine, {0: [order(0, n) for n in range(4)]}, {0: 1000})
    written = pool.submit(shards.write_all)
    under_way = engine.take(IN_FLIGHT)
    update = pool.submit(shards.make_way, "actor.training")
    (copy,) = engine.take()
    for command in under_way:
        finish(command)
    with pytest.raises(AssertionError):
        engine.take(timeout_s=0.2)
    assert not update.done()
    finish(copy)
    update.result(10)
    for _ in range(2):
        finish(*engine.take())
    written.result(10)


def test_what_fails_while_an_update_is_due_is_tried_again_at_once(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    shards = start(engine, {0: [order(0, n, group) for n in range(2) for group in GROUPS]}, {})
    written = pool.submit(shards.write_all)
    first, second = engine.take(2)
    update = pool.submit(shards.make_way, "actor.training")
    finish(second)
    (third,) = engine.take()
    assert third[2]["file"] == "actor.training-0-1.safetensors"
    fail(first)
    (again,) = engine.take()
    assert again[2]["file"] == "actor.training-0-0.safetensors"
    finish(again)
    finish(third)
    update.result(10)
    for command in engine.take(1):
        finish(command)
    written.result(10)


def test_without_room_the_update_waits_and_its_shards_go_first(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    orders = {0: [*(order(0, n) for n in range(4)), *(order(0, n, "critic.training") for n in range(2))]}
    shards = start(engine, orders, {0: 15})  # one of them can be copied
    written = pool.submit(shards.write_all)
    under_way = engine.take(IN_FLIGHT)
    update = pool.submit(shards.make_way, "critic.training")
    (copy,) = engine.take()
    assert copy[2]["files"] == ["critic.training-0-1.safetensors"]
    finish(copy)
    for command in under_way:
        finish(command)
    following = engine.take(2)
    assert finish(following[0]) == "critic.training-0-0.safetensors"
    update.result(10)
    finish(following[1])
    for _ in range(2):
        finish(*engine.take())
    written.result(10)


def test_a_copy_that_fails_leaves_the_update_waiting_for_the_file(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    shards = start(engine, {0: [order(0, n) for n in range(3)]}, {0: 1000})
    written = pool.submit(shards.write_all)
    under_way = engine.take(2)
    update = pool.submit(shards.make_way, "actor.training")
    fail(*engine.take())
    for command in under_way:
        finish(command)
    (last,) = engine.take()
    assert not update.done()
    finish(last)
    update.result(10)
    written.result(10)


@pytest.mark.parametrize("end", ["stop", "failure"])
def test_whoever_waits_is_freed_when_the_commit_is_given_up(pool: ThreadPoolExecutor, end: str) -> None:
    engine = PaperEngine()
    shards = start(engine, {0: [order(0, n) for n in range(3)]}, {})
    written = pool.submit(shards.write_all)
    update = pool.submit(shards.make_way, "actor.training")
    if end == "stop":
        shards.stop()
    else:
        engine.take()[0][3].set_exception(WorkerLost(0, "gone"))
    update.result(10)
    with pytest.raises(ShardFailed):
        written.result(10)
    shards.make_way("actor.training")


def test_after_a_failure_nobody_is_busy_and_no_copy_is_left(pool: ThreadPoolExecutor) -> None:
    engine = PaperEngine()
    shards = start(engine, {0: [order(0, 0)], 1: [order(1, 0), order(1, 1)]}, {})
    written = pool.submit(shards.write_all)
    lost, *others = engine.take(3)
    lost[3].set_exception(WorkerLost(0, "gone"))
    with pytest.raises(ShardFailed):
        written.result(10)
    drained = pool.submit(shards.drain)
    assert not engine.sent
    for command in others:
        finish(command)
    frees = engine.take(2)
    assert {command[1] for command in frees} == {"drop_shard_copies"}
    frees[0][3].set_exception(WorkerLost(0, "gone"))
    finish(frees[1])
    drained.result(10)
