"""The probe leaves nothing behind, sees what is slow, and ends though storage hangs."""

import gc
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from nereus.cluster import Link
from nereus.runtime.local import LocalEngine
from nereus.runtime.probe import measure_machine, measure_speeds
from nereus.runtime.probe_compute import _make_fitting, _Work
from nereus.runtime.probe_storage import _Turns, probe_storage
from nereus.transition.speeds import Speeds
from storage.shard_reader import ShardReader
from storage.shard_record import ShardRecord
from storage.shard_writer import ShardWriter
from storage.state_reader import StateReader
from tests.runtime.slow_links import SEND_S

TENSORS = [torch.ones(256, 1024)]  # 1 MiB


def measure(root: Path, devices: Sequence[int], service: str = "nereus.runtime.rank:Rank") -> Speeds:
    with LocalEngine(service) as engine:
        engine.start(devices)
        return measure_speeds(engine, devices, os.fspath(root), device_type="cpu")


def assert_usable(speeds: Speeds) -> None:
    for field in fields(speeds):
        value = getattr(speeds, field.name)
        if isinstance(value, Link):
            assert 0 < value.bandwidth_bytes_s < 1e15 and 0 <= value.latency_s < 10, field.name
        elif isinstance(value, float):
            assert 0 <= value < 1e15, field.name
    assert speeds.copy_bytes_s > 0 and speeds.verify_bytes_s > 0 and speeds.read_device_bytes_s > 0
    assert speeds.storage_shared <= 1


def test_speeds_of_two_workers_and_of_one(tmp_path: Path) -> None:
    two = measure(tmp_path, [1, 0])
    assert_usable(two)
    assert two.setup_s > 0 and two.node_of(0) == two.node_of(1)
    one = measure(tmp_path, [3])
    assert_usable(one)
    assert one.near.bandwidth_bytes_s == one.copy_bytes_s
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "precision",
    ["float32", pytest.param("bfloat16", marks=pytest.mark.long), pytest.param("float64", marks=pytest.mark.slow)],
)
def test_the_machine_at_hand_as_a_kind_of_node(tmp_path: Path, precision: str) -> None:
    with LocalEngine("nereus.runtime.rank:Rank") as engine:
        engine.start([0, 1])
        speeds = measure_speeds(engine, [0, 1], os.fspath(tmp_path), device_type="cpu")
        more = {"device_type": "cpu", "precision": precision, "memory_bytes": 2**30}
        kind = measure_machine(engine, [1, 0], speeds, **more)  # type: ignore[arg-type]
    assert (kind.devices, kind.memory_bytes, kind.accelerator) == (2, 2**30, False)
    assert (kind.intra_node, kind.storage) == (speeds.near, speeds.write)
    assert 1e8 < kind.peak_flops[precision] < 1e14 and 1e8 < kind.memory_bandwidth_bytes_s < 1e13
    assert kind.peak_flops["bfloat16"] > kind.peak_flops["float32"] > kind.peak_flops["float64"]


@pytest.mark.parametrize("lacking", ["the operand", "a second result"])
def test_what_does_not_fit_is_gone_before_something_smaller_is_made(lacking: str) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def make(halvings: int) -> _Work:
        assert not alive
        operand, calls = torch.empty(8), itertools.count(1)
        alive.add(operand)

        def call() -> torch.Tensor:
            if next(calls) == 2 and halvings < 2 and lacking == "a second result":
                raise MemoryError
            return operand + 1

        if halvings < 2 and lacking == "the operand":
            raise MemoryError
        return _Work(halvings, call)

    assert _make_fitting(make, 3).amount == 2
    with pytest.raises(MemoryError):
        _make_fitting(make, 1)


@pytest.mark.parametrize(("failing", "method"), [(ShardWriter, "add"), (ShardReader, "read")])
def test_storage_that_fails_holds_no_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failing: type, method: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(failing, method, fail)
    tensors = [torch.ones(64) for _ in range(4)]
    held = weakref.WeakSet(tensors)
    gc.disable()
    try:
        probe_storage(os.fspath(tmp_path / "probe"), tensors, limit_s=10.0)
        tensors.clear()
        assert not held
    finally:
        gc.enable()


def test_the_slowest_device_counts(tmp_path: Path) -> None:
    with LocalEngine("tests.runtime.slow_links:SlowCompute") as engine:
        engine.start([0, 1])
        speeds = measure_speeds(engine, [0, 1], os.fspath(tmp_path), device_type="cpu")
        kind = measure_machine(engine, [0, 1], speeds, device_type="cpu", precision="float32", memory_bytes=1)
    assert kind.peak_flops["float32"] == pytest.approx(1e7) and kind.memory_bandwidth_bytes_s == pytest.approx(1e6)


def test_what_a_killed_probe_has_left_goes_with_the_next_one(tmp_path: Path) -> None:
    left, other = tmp_path / f"probe-{'0a' * 16}-3", tmp_path / "probe-of-mine"
    for folder in (left, other):
        folder.mkdir()
        (folder / "0.json").write_text("{}")
    assert_usable(measure(tmp_path, [0]))
    assert os.listdir(tmp_path) == [other.name]


def test_slow_links_show(tmp_path: Path) -> None:
    speeds = measure(tmp_path, [0, 1], "tests.runtime.slow_links:SlowLinks")
    message = 4 * 2**20
    for link in (speeds.near, speeds.near_both):
        assert link is not None and link.seconds(message) >= SEND_S
    assert speeds.copy_bytes_s > message / SEND_S
    assert speeds.read.bandwidth_bytes_s > message / SEND_S


def test_slow_storage_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ShardWriter.finish_shard

    def slow(writer: ShardWriter) -> ShardRecord:
        time.sleep(0.05 if writer.num_bytes < 2**20 else 0.25)
        return finish(writer)

    monkeypatch.setattr(ShardWriter, "finish_shard", slow)
    speeds = probe_storage(os.fspath(tmp_path / "probe"), TENSORS, 10.0)
    assert speeds.write.latency_s >= 0.05
    assert speeds.write.seconds(2**20) >= 0.1  # two shards at the same time
    assert speeds.read.seconds(2**20) < speeds.write.seconds(2**20)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("both_s", "shared"), [(0.9, 0.0), (1.0, 0.0), (1.25, 0.5), (1.5, 1.0), (2.0, 1.0)])
def test_what_writing_and_reading_share(tmp_path: Path, both_s: float, shared: float) -> None:
    turns = _Turns(os.fspath(tmp_path), TENSORS)
    for part, seconds in (("write", 1.0), ("read", 0.5), ("both", both_s)):
        turns.take(part, seconds)
    assert turns.speeds(10.0).shared == pytest.approx(shared)


@pytest.mark.parametrize("hanging", [ShardWriter, StateReader])
def test_storage_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hanging: type) -> None:
    end, method = threading.Event(), "finish_shard" if hanging is ShardWriter else "finish"
    original = getattr(hanging, method)

    def hang(self: object) -> object:
        assert end.wait(60)
        return original(self)

    monkeypatch.setattr(hanging, method, hang)
    before = set(threading.enumerate())
    begun = time.perf_counter()
    speeds = probe_storage(os.fspath(tmp_path / "probe"), TENSORS, 0.3)
    assert time.perf_counter() - begun < 30
    assert speeds.read.seconds(2**20) >= 0.15
    assert (speeds.write.seconds(2**20) >= 0.15) == (hanging is ShardWriter)
    assert list(tmp_path.iterdir())
    end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert not list(tmp_path.iterdir())


def test_storage_that_fails_is_slow(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    speeds = probe_storage(os.fspath(tmp_path / "file" / "probe"), TENSORS, 5.0)
    assert speeds.write.seconds(2**20) >= 2.5 and speeds.read.seconds(2**20) >= 2.5 and speeds.record_s == 5.0
