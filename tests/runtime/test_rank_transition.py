"""Real workers go from plan to plan, primitive by primitive: what they hold is compared element by element."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.emu import emus_of
from nereus.plan import Plan, stage_of
from nereus.runtime.engine import CommandError, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.model_stages import next_epoch
from nereus.runtime.rank_state import Counters
from nereus.runtime.shard_feeds import FeedEnd
from nereus.runtime.sources import ModelSource
from nereus.runtime.training import LossSettings, OptimizerSettings
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder, TransitionOrder, UnitKey
from nereus.staged_state import STAGED, plan_shards
from nereus.transition.graph import InfeasibleTransition, plan_transition
from nereus.transition.memory import resident_bytes
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.undo import plan_undo
from nereus.transition.verify import combine
from tests.transition.cases import LEAST_ROOM, SPECS, memory_for, random_plan, stage

DEVICES = range(4)
COUNTERS = {name: Counters(7, 1) for name in STAGED}
NAMES = list(SPECS)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("tests.runtime.moving_rank:MovingRank", memory_per_device_bytes=1 << 30) as engine:
        engine.start(DEVICES)
        yield engine


class Job:
    """Drives workers as a driver does, one primitive after the other."""

    def __init__(self, engine: LocalEngine, plan: Plan, precision: str, folder: Path) -> None:
        self.engine, self.plan, self.precision, self.folder = engine, plan, precision, folder
        self.records: dict[str, list[Any]] = {}
        self._sets = itertools.count()
        self.run("release", DEVICES)
        epoch = next_epoch()
        for name in plan:
            self.run("build", plan[name].devices, order=self._order(plan, name, epoch))
        self._connect_sync(epoch)
        self.run("mark", DEVICES)
        self._hold_shards()

    def run(self, method: str, devices: Sequence[int], **arguments: Any) -> dict[int, Any]:
        return run_command(self.engine, method, dict.fromkeys(devices, arguments), label=method, step=0)

    def _order(self, plan: Plan, name: str, epoch: int) -> BuildOrder:
        source = ModelSource(SPECS[name], None, 0, name.partition(".")[0], "actor")
        return BuildOrder(
            name,
            plan[name],
            epoch,
            source,
            getattr(torch, self.precision),
            OptimizerSettings((0.9, 0.999), 1e-5, 0.0, 1.0),
            LossSettings(0.2, 0.2, 1.0),
        )

    def _connect_sync(self, epoch: int) -> None:
        training, generation = self.plan["actor.training"], self.plan["actor.generation"]
        devices = sorted({*training.devices, *generation.devices})
        self.run("connect_sync", devices, epoch=epoch, training=training, generation=generation)

    def _hold_shards(self) -> None:
        size = 8 if self.precision == "float64" else 4
        self.orders = plan_shards(self.plan, SPECS, element_bytes=size)
        kwargs = {device: {"orders": self.orders.get(device, ())} for device in DEVICES}
        run_command(self.engine, "hold_shards", kwargs, label="shards", step=0)

    # A transition

    def graph_to(self, target: Plan, transport: str, room: int) -> TransitionGraph:
        self.memory = replace(memory_for(self.plan, target, LEAST_ROOM + room), precision=self.precision)
        held = memory_for_precision(self.memory, self.plan, target, LEAST_ROOM + room)
        self.memory = replace(self.memory, usable_bytes=held)
        return plan_transition(self.plan, target, self.memory, transport=transport)

    def begin(self, graph: TransitionGraph) -> None:
        target, epoch = graph.target, next_epoch()
        devices = tuple(sorted({*graph.current.devices, *target.devices}))
        self.changed = [n for n in target if self._keys(target, n) != self._keys(graph.current, n)]
        training, generation = target["actor.training"], target["actor.generation"]
        moves_actor = not {"actor.training", "actor.generation"}.isdisjoint(self.changed)
        kwargs = {}
        for device in devices:
            builds = tuple(self._order(target, n, epoch) for n in self.changed if device in target[n].devices)
            syncs = moves_actor and device in {*training.devices, *generation.devices}
            order = TransitionOrder(epoch, devices, builds, (training, generation) if syncs else None)
            kwargs[device] = {"order": order}
        run_command(self.engine, "begin_transition", kwargs, label="begin", step=0)
        self.devices = devices

    def _keys(self, plan: Plan, name: str) -> set[Any]:
        return {(unit, unit.replica) for unit in emus_of(plan) if unit.model_stage == name}

    def do(self, primitive: Primitive) -> None:
        if primitive.kind == "stage":
            self._stage(primitive.model_stage)
            return
        restore = self._restore_order(primitive) if primitive.kind == "restore" else None
        received = self.run("run_primitive", primitive.devices, primitive=primitive, restore=restore)
        if primitive.transport == "direct":
            assert sum(received.values()) == primitive.bytes

    def _stage(self, group: str) -> None:
        folder = os.fspath(self.folder / f"set{next(self._sets)}")
        os.makedirs(folder)
        self.records[group] = [folder]
        for device, orders in self.orders.items():
            for order in orders:
                if order.group == group:
                    written = self.run("write_shard", [device], folder=folder, file=order.file)
                    self.records[group].append(written[device])

    def _restore_order(self, primitive: Primitive) -> RestoreOrder:
        name = primitive.model_stage
        if stage_of(name) == "inference":
            return RestoreOrder(source=self._order(self.plan, name, 0).source)
        group = "actor.training" if name == "actor.generation" else name
        folder, *records = self.records[group]
        if not primitive.streams:
            return RestoreOrder(group, folder, tuple(records))
        for item in [FeedEnd(len(records)), *records]:
            for device in primitive.devices:
                self.engine.submit_beside(device, "feed_shard", feed=primitive.id, item=item).result(timeout=30)
        return RestoreOrder(group, folder, feed=primitive.id)

    def commit(self, graph: TransitionGraph) -> None:
        self.run("commit_transition", self.devices, epoch=0, counters=COUNTERS, policy_version=7)
        for primitive in graph.primitives:
            if primitive.after_commit:
                self.do(primitive)
        self.run("end_transition", self.devices, epoch=0)
        self.plan = graph.target
        self._hold_shards()

    def sums(self, plan: Plan) -> dict[str, dict[str, int]]:
        units = emus_of(plan)
        kwargs = {
            device: {"keys": [UnitKey.of(unit) for unit in units if device in unit.devices]} for device in plan.devices
        }
        return combine(run_command(self.engine, "sum_up", kwargs, label="sums", step=0), units, SPECS)

    def check(self, updates: int | None = None) -> None:
        """Check that exactly the plan's units are there and in force, over the right numbers."""
        wrong = self.run("count_wrong", DEVICES)
        force = self.run("describe_force", DEVICES)
        for device in DEVICES:
            wanted = {UnitKey.of(unit) for unit in emus_of(self.plan) if device in unit.devices}
            assert wrong[device] == dict.fromkeys(wanted, 0)
            assert {key for key, _, _ in force[device].values()} == wanted
            for name, (_, counted, is_over) in force[device].items():
                assert is_over, name
                if updates is not None and name in STAGED:
                    assert counted == updates


def memory_for_precision(memory: Any, current: Plan, target: Plan, room: int) -> dict[int, int]:
    """Return what devices may hold: either plan's units, and some room more."""
    devices = sorted({*current.devices, *target.devices})
    held = [resident_bytes(plan, memory, devices) for plan in (current, target)]
    return {d: max(held[0][d], held[1][d]) + room for d in devices}


@pytest.mark.parametrize(
    ("transport", "precision", "seed"),
    [
        ("auto", "bfloat16", 0),
        pytest.param("direct", "float64", 0, marks=pytest.mark.long),
        pytest.param("staged", "bfloat16", 0, marks=pytest.mark.long),
        pytest.param("direct", "float64", 1, marks=pytest.mark.long),
        pytest.param("staged", "bfloat16", 1, marks=pytest.mark.long),
        pytest.param("auto", "bfloat16", 1, marks=pytest.mark.long),
    ],
)
def test_random_plans_are_reached(
    engine: LocalEngine, tmp_path: Path, seed: int, transport: str, precision: str
) -> None:
    """With much room new units are made beside the old ones, with little room in place of them."""
    rng = random.Random(seed)
    job = Job(engine, random_plan(rng, 4, NAMES), precision, tmp_path)
    job.check()
    sums = job.sums(job.plan)
    for room in (10**7, 20_000, 0):
        target = random_plan(rng, 4, NAMES)
        try:
            graph = job.graph_to(target, transport, room)
        except InfeasibleTransition:
            continue
        job.begin(graph)
        for primitive in graph.primitives:
            if not primitive.after_commit:
                job.do(primitive)
        assert job.sums(graph.target) == sums
        job.commit(graph)
        job.check()
    job.run("spoil", DEVICES, model_stage="actor.generation")
    job.run("sync_weights", sync_devices(job.plan), policy_version=policy_version(job))
    job.check()


def sync_devices(plan: Plan) -> list[int]:
    return sorted({*plan["actor.training"].devices, *plan["actor.generation"].devices})


def policy_version(job: Job) -> int:
    device = job.plan["actor.training"].devices[0]
    return job.run("describe_force", [device])[device]["actor.training"][1]


@pytest.mark.parametrize("precision", [pytest.param("float32", marks=pytest.mark.long), "bfloat16"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_the_way_back_from_anywhere(engine: LocalEngine, tmp_path: Path, seed: int, precision: str) -> None:
    rng = random.Random(100 + seed)
    transport = rng.choice(["direct", "staged", "auto"])
    job = Job(engine, random_plan(rng, 4, NAMES), precision, tmp_path)
    for room in (10**7, 20_000, 0):
        try:
            graph = job.graph_to(random_plan(rng, 4, NAMES), transport, room)
        except InfeasibleTransition:
            continue
        before = [primitive for primitive in graph.primitives if not primitive.after_commit]
        done = before[: rng.randint(0, len(before))]
        job.begin(graph)
        for primitive in done:
            job.do(primitive)
        try:
            undo = plan_undo(graph, [primitive.id for primitive in done], job.memory)
        except InfeasibleTransition:
            return
        for primitive in undo.primitives:
            job.do(primitive)
        job.run("undo_transition", job.devices, epoch=0)
        job.check(updates=0)


@pytest.mark.parametrize(
    ("transport", "room"),
    [("direct", 0), *(pytest.param(way, 10**7, marks=pytest.mark.long) for way in ("direct", "staged"))],
)
def test_tensors_in_place_are_taken_over(engine: LocalEngine, tmp_path: Path, transport: str, room: int) -> None:
    """tp 2 moves by one device: device 1 keeps the very tensors, those of its compute copy too, on every transport."""
    one, two = (Plan.of({name: stage(1, 2, 1, first=first) for name in NAMES}) for first in (0, 1))
    job = Job(engine, one, "bfloat16", tmp_path)
    before = job.run("locate", [1])[1]
    graph = job.graph_to(two, transport, room)
    assert all(1 in primitive.shares for primitive in graph.primitives if primitive.makes)
    job.begin(graph)
    for primitive in graph.primitives:
        if not primitive.after_commit:
            job.do(primitive)
    job.commit(graph)
    job.check(updates=7)
    assert job.run("locate", [1])[1] == before


def test_a_kept_unit_works_over_new_links(engine: LocalEngine, tmp_path: Path) -> None:
    """One replica more: what was there is in force again on the same tensors, with its counters."""
    one, two = (Plan.of({name: stage(dp, 1, 1) for name in NAMES}) for dp in (1, 2))
    job = Job(engine, one, "bfloat16", tmp_path)
    before = job.run("locate", [0])[0]
    graph = job.graph_to(two, "direct", 10**7)
    job.begin(graph)
    for primitive in graph.primitives:
        job.do(primitive)
    job.commit(graph)
    job.check(updates=7)
    assert job.run("locate", [0])[0] == before


def test_a_failed_primitive_leaves_nothing_behind(engine: LocalEngine, tmp_path: Path) -> None:
    """A restore whose set is never complete fails on all devices; the old plan is in force again, and can be left."""
    one, two = (Plan.of({name: stage(1, tp, 1) for name in NAMES}) for tp in (1, 2))
    job = Job(engine, one, "float32", tmp_path)
    graph = job.graph_to(two, "staged", 10**7)
    job.begin(graph)
    restore = next(p for p in graph.primitives if p.kind == "restore" and p.model_stage == "critic.training")
    job._stage("critic.training")
    folder, *_ = job.records["critic.training"]
    for device in restore.devices:
        end = FeedEnd(failure="disk full")
        engine.submit_beside(device, "feed_shard", feed=restore.id, item=end).result(timeout=30)
    order = RestoreOrder("critic.training", folder, feed=restore.id)
    with pytest.raises(CommandError, match="disk full"):
        job.run("run_primitive", restore.devices, primitive=restore, restore=order)
    engine.recover()
    job.run("drop_primitive", restore.devices, primitive=restore)
    job.run("undo_transition", job.devices, epoch=0)
    job.check(updates=0)
    graph = job.graph_to(two, "direct", 10**7)
    job.begin(graph)
    for primitive in graph.primitives:
        if not primitive.after_commit:
            job.do(primitive)
    job.commit(graph)
    job.check(updates=7)
