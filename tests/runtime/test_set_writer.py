"""Sets of transitions with workers of paper: what runs at the same time, and what a failure waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nereus.runtime import set_writer
from nereus.runtime.set_writer import TransitionSetWriter
from nereus.runtime.shard_queue import MOST_TRIES, ShardFailed
from nereus.staged_state import ShardOrder
from storage.manifest import ShardRecord
from tests.runtime.test_shard_queue import GROUPS, PaperEngine, fail, order

ACTOR, CRITIC = GROUPS


def write(writer: TransitionSetWriter, group: str, orders: dict[int, Sequence[ShardOrder]], epoch: int) -> Any:
    return writer.write(4, epoch, group, orders, lambda record: None)


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def engine() -> PaperEngine:
    return PaperEngine()


@pytest.fixture
def writer(tmp_path: Path, engine: PaperEngine) -> Iterator[TransitionSetWriter]:
    writer = TransitionSetWriter(engine, str(tmp_path), run_id="run", take_over=3)
    yield writer
    writer.stop()


def files_of(commands: Sequence[tuple[int, str, dict[str, Any], Future]]) -> set[str]:
    return {command[2]["file"] for command in commands}


def finish(command: tuple[int, str, dict[str, Any], Future]) -> None:
    """End a command as a worker does, with a shard of one byte."""
    _, _, kwargs, future = command
    Path(kwargs["folder"]).mkdir(exist_ok=True)
    Path(kwargs["folder"], kwargs["file"]).write_bytes(b"x")
    group = kwargs["file"].partition("-")[0]
    future.set_result(ShardRecord(group, kwargs["file"], 1, "", {}, ()))


def test_groups_on_the_same_device_are_written_one_after_the_other(
    pool: ThreadPoolExecutor, engine: PaperEngine, writer: TransitionSetWriter
) -> None:
    orders = {0: [order(0, 0, ACTOR), order(0, 0, CRITIC)], 1: [order(1, 0, ACTOR)], 2: [order(2, 0, CRITIC)]}
    first = pool.submit(write, writer, ACTOR, orders, 1)
    under_way = engine.take(2)
    second = pool.submit(write, writer, CRITIC, orders, 2)
    with pytest.raises(TimeoutError):
        second.result(0.2)
    assert not engine.sent, "device 0 is still busy with the other group"
    writer.stop()
    for written in (first, second):
        with pytest.raises(ShardFailed):
            written.result(10)
    assert files_of(under_way) == {f"{ACTOR}-0-0.safetensors", f"{ACTOR}-1-0.safetensors"}


def test_groups_on_different_devices_are_written_at_the_same_time(
    pool: ThreadPoolExecutor, engine: PaperEngine, writer: TransitionSetWriter
) -> None:
    orders = {0: [order(0, 0, ACTOR)], 1: [order(1, 0, CRITIC)]}
    written = [pool.submit(write, writer, group, orders, epoch) for epoch, group in enumerate(GROUPS)]
    commands = engine.take(2)
    assert {Path(command[2]["folder"]).name for command in commands} == {
        "transition-00000004-3.0",
        "transition-00000004-3.1",
    }
    writer.stop()
    assert all(isinstance(one.exception(10), ShardFailed) for one in written)


def test_a_failure_waits_until_no_worker_writes_into_the_folder_any_more(
    pool: ThreadPoolExecutor, engine: PaperEngine, writer: TransitionSetWriter, tmp_path: Path
) -> None:
    written = pool.submit(write, writer, ACTOR, {0: [order(0, 0, ACTOR)], 1: [order(1, 0, ACTOR)]}, 1)
    late = None
    for _ in range(MOST_TRIES + 1):
        (command,) = engine.take(1)
        if command[0] == 1:
            late = command
        else:
            fail(command)
    assert late is not None
    with pytest.raises(TimeoutError):
        written.result(0.3)
    finish(late)
    with pytest.raises(ShardFailed, match="device 0"):
        written.result(10)
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_tried_again(
    pool: ThreadPoolExecutor, engine: PaperEngine, writer: TransitionSetWriter, tmp_path: Path
) -> None:
    def refuse(root: str, name: str) -> None:
        raise OSError("busy")

    written = pool.submit(write, writer, ACTOR, {0: [order(0, 0, ACTOR)]}, 1)
    for _ in range(MOST_TRIES):
        (command,) = engine.take(1)
        folder = Path(command[2]["folder"])
        fail(command)
    assert written.exception(10) is not None
    folder.mkdir()
    Path(folder, "x").write_bytes(b"x")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(set_writer, "discard_set", refuse)
        writer.discard()
    assert folder.exists()
    writer.discard()
    assert not folder.exists()
