"""Messages of slices: cut alike by both ends, and gathered from and scattered to where the slices lie."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from nereus.layout import plan_copies, slices_of
from nereus.runtime.engine import run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.slice_transfer import cut_buckets, most_peers, plan_exchange
from storage.slices import TensorSlice
from tests.transition.cases import SPEC, random_stage

EPOCHS = itertools.count(1)


@pytest.mark.parametrize("seed", range(10))
def test_both_ends_cut_the_same_messages(seed: int) -> None:
    rng = random.Random(seed)
    source, target = random_stage(rng, 6), random_stage(rng, 6)
    copies = plan_copies(SPEC, source.layout, source.replicas, target.layout, target.replicas)
    devices, most, lone = list(range(6)), rng.choice([10, 100, 10_000]), rng.choice([None, 8, 80])
    exchanges = [plan_exchange(copies, devices, device, most_elements=most, lone_elements=lone) for device in devices]
    for sender, receiver in itertools.permutations(devices, 2):
        assert exchanges[sender].sends.get(receiver) == exchanges[receiver].receives.get(sender)
    for device, exchange in enumerate(exchanges):
        assert len(exchange.sends) <= most_peers(copies) and len(exchange.receives) <= most_peers(copies)
        parts = [*exchange.local, *(p for b in exchange.receives.values() for bucket in b for p in bucket.parts)]
        wanted = 0
        if device in target.devices:
            wanted = sum(
                p.num_elements
                for p in slices_of(SPEC, target.layout, target.devices.index(device) % target.layout.size)
            )
        assert sum(part.num_elements for part in parts) == wanted


def test_large_parts_are_cut_along_rows() -> None:
    parts = [TensorSlice("a", (2, 3), (10, 4)), TensorSlice("b", (0,), (5,)), TensorSlice("c", (0, 0), (2, 30))]
    buckets = cut_buckets(parts, 13, 14)
    assert all(bucket.num_elements <= 13 or len(bucket.parts) == 1 for bucket in buckets)
    cut = [part for bucket in buckets for part in bucket.parts]
    assert [part for part in cut if part.name == "a"][-1] == TensorSlice("a", (11, 3), (1, 4))
    assert sum(part.num_elements for part in cut) == 40 + 5 + 60


def test_large_parts_travel_alone() -> None:
    parts = [TensorSlice(name, (0,), (size,)) for name, size in (("a", 2), ("b", 7), ("c", 3), ("d", 9), ("e", 6))]
    buckets = cut_buckets(parts, 10, 7)
    assert [[part.name for part in bucket.parts] for bucket in buckets] == [["b"], ["d"], ["a", "c"], ["e"]]
    assert [bucket.num_elements for bucket in buckets] == [7, 9, 5, 6]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("tests.runtime.parts_service:PartsService") as engine:
        engine.start(range(3))
        yield engine


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("same_host", [True, False], ids=["shared", "gloo"])
@pytest.mark.parametrize(
    ("dtype", "target"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float64)],
)
def test_parts_arrive_whatever_their_strides(
    engine: LocalEngine, size: int, same_host: bool, dtype: torch.dtype, target: torch.dtype
) -> None:
    devices, epoch = list(range(size)), next(EPOCHS)

    def run(method: str, **arguments: object) -> dict[int, list[bool]]:
        return run_command(engine, method, dict.fromkeys(devices, arguments), label=method, step=None)

    run("connect", devices=devices, epoch=epoch, same_host=same_host)
    for came in run("pass_parts", dtype=dtype, target=target, rounds=3).values():
        assert len(came) == 24 and all(came)
