"""Our side of the benchmark of staged state: workers that write as in a run, workers that read, and a raw write."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from nereus.layout import Layout, slices_of
from nereus.limits import REMOTE_SHARD_BYTES, REMOTE_SHARDS_IN_FLIGHT, SHARD_BYTES, SHARDS_IN_FLIGHT
from nereus.model.spec import tensors
from nereus.runtime.rank_state import Counters
from nereus.runtime.shard_queue import ShardQueue
from nereus.staged_state import PREFIXES, plan_shards
from storage.manifest import Manifest
from storage.state import commit_state, read_state
from tests.benchmarks.bench_job import Workers, open_workers

SERVICE = "tests.benchmarks.staged_service:StagedRank"
STAGE = "actor.training"
RANKS = 2
RAW_BLOCK_BYTES = 64 * 2**20
_OTHER_STAGES = ("actor.generation", "critic.training", "reference.inference")


class Ours:
    """Two workers that hold a model-stage with tp2 and write it, and two that read it with pp2."""

    def __init__(self, model: str | Mapping[str, Any], *, remote: bool = False) -> None:
        """Remember what is measured.

        Args:
            model: a directory, or sizes of a random model.
            remote: whether the place is an object store, which changes the sizes and number of shards.
        """
        self._model, self._stack = model, ExitStack()
        self._shard_bytes = REMOTE_SHARD_BYTES if remote else SHARD_BYTES
        self._in_flight = REMOTE_SHARDS_IN_FLIGHT if remote else SHARDS_IN_FLIGHT

    def __enter__(self) -> Self:
        with self._stack as stack:
            self.writers = self._open(stack, {"tp": RANKS})
            self.readers = self._open(stack, {"pp": RANKS})
            job = self.writers.job
            self.spec = job.specs[STAGE]
            all_orders = plan_shards(job.plan, job.specs, element_bytes=4, max_shard_bytes=self._shard_bytes)
            self._orders = {
                device: tuple(order for order in orders if order.group == STAGE)
                for device, orders in all_orders.items()
            }
            self.writers.run("hold_shards", {device: {"orders": orders} for device, orders in self._orders.items()})
            self._call(self.writers, "fill")
            self.bytes_written = sum(order.num_bytes for orders in self._orders.values() for order in orders)
            self.bytes_read = 0
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _open(self, stack: ExitStack, layout: Mapping[str, int]) -> Workers:
        plan = {STAGE: layout, **{name: {} for name in _OTHER_STAGES}}
        sizes: dict[str, Any] = {"devices": RANKS, "threads": 1, "gib": 6}
        opened = open_workers(self._model, service=SERVICE, **sizes, plan=plan, precision="float32")
        workers = stack.enter_context(opened)
        workers.build([STAGE])
        return workers

    def _call(self, workers: Workers, method: str, **arguments: Any) -> dict[int, Any]:
        kwargs = {"model_stage": STAGE, **arguments}
        return workers.run(method, dict.fromkeys(workers.job.plan[STAGE].devices, kwargs))

    def _measure_memory(self, workers: Workers, method: str) -> list[int]:
        return list(workers.run(method, {device: {} for device in range(RANKS)}).values())

    def write(self, folder: str) -> dict[str, float]:
        """Write and commit a set; return the seconds and the extra memory of a worker."""
        self._measure_memory(self.writers, "mark_memory")
        begun = time.perf_counter()
        shards = ShardQueue(self.writers.engine, folder, self._orders, {}, shards_in_flight=self._in_flight)
        commit_state(folder, Manifest("benchmark", 0, {}, {}, shards.write_all()))
        seconds = time.perf_counter() - begun
        return {"write_s": seconds, "write_extra_bytes": max(self._measure_memory(self.writers, "peak_bytes"))}

    def read(self, folder: str) -> dict[str, float]:
        """Read a set into the workers of the other layout; return the seconds and the extra memory of a worker."""
        self._call(self.readers, "spoil")
        self._measure_memory(self.readers, "mark_memory")
        begun = time.perf_counter()
        manifest = read_state(folder)
        restored = self._call(
            self.readers, "restore", folder=folder, shards=manifest.shards_of(STAGE), counters=Counters()
        )
        seconds = time.perf_counter() - begun
        damage = [result.damage for result in restored.values() if result.damage]
        assert not damage, damage
        self.bytes_read = sum(result.num_bytes for result in restored.values())
        return {"read_s": seconds, "read_extra_bytes": max(self._measure_memory(self.readers, "peak_bytes"))}

    def check(self) -> None:
        """Check that every element that was read last is the one that was written."""
        assert set(self._call(self.readers, "count_differing").values()) == {0}

    def shard_sizes(self) -> list[list[int]]:
        """Return the bytes of each shard, per device."""
        return [[order.num_bytes for order in self._orders[device]] for device in range(RANKS)]

    def describe(self, store: str) -> dict[str, Any]:
        """Return what `CheckpointPeer` needs to hold the same tensors."""
        infos = tensors(self.spec).values()
        shapes = {
            prefix + info.name: [list(info.shape), None if info.split is None else info.split.dim]
            for prefix in PREFIXES
            for info in infos
        }
        held = [{part.name for part in slices_of(self.spec, Layout(1, RANKS), rank)} for rank in range(RANKS)]
        stages = [[prefix + name for prefix in PREFIXES for name in sorted(names)] for names in held]
        return {"tensors": shapes, "stages": stages, "store": store}


def raw_write(path: str, num_bytes: int) -> float:
    """Write bytes front to back into a new file and sync it; return the seconds."""
    block = memoryview(os.urandom(RAW_BLOCK_BYTES))
    begun = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        while num_bytes:
            num_bytes -= os.write(fd, block[: min(num_bytes, RAW_BLOCK_BYTES)])
        os.fsync(fd)
    finally:
        os.close(fd)
    seconds = time.perf_counter() - begun
    os.unlink(path)
    return seconds
