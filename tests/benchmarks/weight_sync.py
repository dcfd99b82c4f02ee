"""Rate of a weight sync against raw transfers of the same bytes over the same pairs of workers, in one run.

Run `python -m tests.benchmarks.weight_sync [--model DIR] [--quick] [--json FILE]`. For each pair of layouts the workers
take turns with three things: a sync of SmolLM2's weights from `actor.training` to `actor.generation`; the same bytes
from prepared buffers over plain gloo (torch.distributed); the same over the communicator that the sync uses. Bytes that
stay on a device are copied inside it in all three.

GB/s count all bytes that `actor.generation` is filled with. A sync also gathers them from the parameters and lays them
down in place, which raw transfers don't.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nereus.runtime.weight_sync import sync_copies
from tests.benchmarks.bench_job import Workers, open_workers, pin_to_cores
from tests.benchmarks.report import DEFAULT_MODEL, OUT_DIR, describe_run, print_table, require_model, write_record

TRAINING, GENERATION = "actor.training", "actor.generation"


@dataclass(frozen=True)
class Case:
    """Where the weights are and where they go."""

    name: str
    devices: int
    training: dict[str, Any]
    generation: dict[str, Any]


CASES = (
    Case("tp2 -> pp2, same devices", 2, {"tp": 2}, {"pp": 2}),
    Case("dp1 -> dp1, other device", 2, {"devices": [0]}, {"devices": [1]}),
    Case("dp1 -> dp2, other devices", 3, {"devices": [0]}, {"dp": 2, "devices": [1, 2]}),
    Case("dp2 -> dp2, same devices", 2, {"dp": 2}, {"dp": 2}),
)


@dataclass(frozen=True)
class Traffic:
    """Bytes of one sync by pair of devices (source, target); equal ones stay inside a device."""

    bytes: dict[tuple[int, int], int]
    devices: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())

    @property
    def moved(self) -> int:
        return sum(n for (source, target), n in self.bytes.items() if source != target)

    def exchange(self, way: str) -> dict[int, dict[str, Any]]:
        """Return every device's arguments of the raw exchange, peers by rank."""
        ranks = {device: rank for rank, device in enumerate(self.devices)}
        return {
            device: {
                "way": way,
                "sends": {ranks[t]: n for (s, t), n in self.bytes.items() if s == device != t},
                "receives": {ranks[s]: n for (s, t), n in self.bytes.items() if t == device != s},
                "local": self.bytes.get((device, device), 0),
            }
            for device in self.devices
        }


def traffic_of(workers: Workers) -> Traffic:
    job = workers.job
    plans = job.plan[TRAINING], job.plan[GENERATION]
    element_bytes = getattr(torch, job.config.precision).itemsize
    sums: dict[tuple[int, int], int] = {}
    for copy in sync_copies(job.sources[TRAINING].spec, *plans):
        pair = copy.source, copy.target
        sums[pair] = sums.get(pair, 0) + copy.slice.num_elements * element_bytes
    return Traffic(sums, tuple(sorted({*plans[0].devices, *plans[1].devices})))


def measure(case: Case, model: str, *, repeats: int) -> dict[str, Any]:
    """Return the record of one pair of layouts: GB/s of the sync and of both raw ways."""
    other: dict[str, Any] = {"critic.training": {}, "reference.inference": {}}
    tree: dict[str, Any] = {
        "plan": {TRAINING: case.training, GENERATION: case.generation, **other},
        "precision": "float32",
    }
    tree["rollout"] = {"max_prompt_tokens": 16, "max_response_tokens": 16, "prompts_per_step": 4}
    with open_workers(model, devices=case.devices, threads=1, gib=6, **tree) as workers:
        epoch = workers.build([TRAINING, GENERATION])
        traffic = traffic_of(workers)
        devices = traffic.devices
        plans = {"training": workers.job.plan[TRAINING], "generation": workers.job.plan[GENERATION]}
        workers.run("connect_sync", {device: {"epoch": epoch, **plans} for device in devices})
        group = {"name": "raw", "size": len(devices)}
        workers.run("connect_gloo", {device: {**group, "rank": rank} for rank, device in enumerate(devices)})
        ways: dict[str, Callable[[], Any]] = {
            "sync": lambda: workers.run("sync_weights", {device: {"policy_version": 0} for device in devices}),
            "gloo": lambda: workers.run("exchange", traffic.exchange("gloo")),
            "communicator": lambda: workers.run("exchange", traffic.exchange("communicator")),
        }
        received = sum(ways["sync"]().values())
        assert received == traffic.moved, (received, traffic.moved)
        seconds = take_turns(ways, repeats)
    rates = {way: traffic.total / value / 1e9 for way, value in seconds.items()}
    return {
        "layouts": case.name,
        "total_bytes": traffic.total,
        "moved_bytes": traffic.moved,
        "seconds": seconds,
        "gb_per_s": rates,
        "ratio_to_gloo": rates["sync"] / rates["gloo"],
        "ratio_to_communicator": rates["sync"] / rates["communicator"],
    }


def take_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return each way's median seconds, after one of each to warm up."""
    for call in ways.values():
        call()
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, call in ways.items():
            begun = time.perf_counter()
            call()
            seconds[way].append(time.perf_counter() - begun)
    return {way: statistics.median(values) for way, values in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--json", default=str(OUT_DIR / "weight_sync.json"), help="file to write the record to")
    options = parser.parse_args(arguments)
    require_model(options.model)
    pin_to_cores(2)
    head = describe_run("weight_sync", threads=2)
    rows = [measure(case, options.model, repeats=2 if options.quick else options.repeats) for case in CASES]
    write_record({**head, "model": options.model, "rows": rows}, options.json)
    columns = ["training -> generation", "GB", "moved", "sync s", "sync", "gloo", "communicator", "sync / gloo"]
    lines = [
        [
            row["layouts"],
            row["total_bytes"] / 1e9,
            row["moved_bytes"] / 1e9,
            row["seconds"]["sync"],
            *(row["gb_per_s"][way] for way in ("sync", "gloo", "communicator")),
            row["ratio_to_gloo"],
        ]
        for row in rows
    ]
    print_table("GB/s of a weight sync (float32) and of raw transfers of the same bytes", columns, lines)


if __name__ == "__main__":
    main()
