"""One trial of a transition in the real executor: workers hold the old plan's units, a `Transition` moves them."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nereus.config import RunConfig
from nereus.emu import emus_of
from nereus.model.spec import ModelSpec
from nereus.plan import MODEL_STAGES, Plan, role_of
from nereus.runtime.engine import run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.model_stages import build_order, next_epoch
from nereus.runtime.rank_state import Counters
from nereus.runtime.set_writer import TransitionSetWriter
from nereus.runtime.transition import Boundary, Submit, Transition
from nereus.runtime.transition_orders import UnitKey
from nereus.runtime.transition_sets import TransitionSets
from nereus.staged_state import plan_shards
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Primitive, TransitionGraph
from storage.manifest import ShardRecord
from tests.runtime.paced_rank import RememberedSource
from tests.transition.cases import stage

DEVICES = range(4)
_COUNTERS = {name: Counters(7, 1) for name in ("actor.training", "critic.training")}
_STEP = 3


class Job:
    """What a transition asks of a job: random models, in float32."""

    def __init__(self, specs: Mapping[str, ModelSpec]) -> None:
        self.specs = specs
        self.config = RunConfig()
        self.sources = {name: RememberedSource(specs[name], None, 0, role_of(name), "actor") for name in specs}


class NothingCommitted:
    """Staging without any commit: only sets for one transition are written, by the real writer."""

    def __init__(self, engine: LocalEngine, root: Path, shards: dict[int, Any]) -> None:
        self._writer = TransitionSetWriter(engine, os.fspath(root), run_id="amber", take_over=0)
        self._shards = shards

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def transition_folder(self, step: int, epoch: int) -> str:
        return self._writer.folder(step, epoch)

    def write_transition_set(
        self, step: int, epoch: int, group: str, on_record: Callable[[ShardRecord], None]
    ) -> tuple[ShardRecord, ...]:
        return self._writer.write(step, epoch, group, self._shards, on_record)

    def discard_transition_sets(self) -> None:
        self._writer.discard()


def with_what_stays(graph: TransitionGraph) -> TransitionGraph:
    """Return a graph of some model-stages as one of a whole job, whose others stay on device 0."""
    others = {name: stage(1, 1, 1) for name in MODEL_STAGES if name not in graph.target}

    def whole(plan: Plan) -> Plan:
        every = {**dict(plan.items()), **others}
        return Plan.of({name: every[name] for name in MODEL_STAGES})

    kept = tuple(unit for unit in emus_of(Plan.of(others)))
    return replace(graph, current=whole(graph.current), target=whole(graph.target), kept=(*graph.kept, *kept))


class Trial:
    """Real workers on the old plan of a graph."""

    def __init__(self, engine: LocalEngine, graph: TransitionGraph, memory: TransitionMemory, folder: Path) -> None:
        """Build the old plan's units.

        Args:
            graph: of a whole job.
            memory: by which it was planned; it knows the models.
            folder: for staged sets.
        """
        self.engine, self.graph = engine, graph
        job, plan = Job(memory.specs), graph.current
        shards = plan_shards(plan, memory.specs, element_bytes=4)
        epoch, kwargs = next_epoch(), dict[int, dict[str, Any]]()
        builds = [build_order(job, plan, name, epoch, False) for name in plan]  # type: ignore[arg-type]
        training, generation = plan["actor.training"], plan["actor.generation"]
        for device in engine.pids():
            syncs = device in {*training.devices, *generation.devices}
            kwargs[device] = {
                "seed": next(_seeds),
                "builds": [order for order in builds if device in order.plan.devices],
                "sync": (epoch, training, generation) if syncs else None,
                "shards": shards.get(device, ()),
            }
        run_command(engine, "begin_trial", kwargs, label="begin", step=_STEP)
        self._staging = NothingCommitted(engine, folder, shards)
        self.records: list[dict[str, Any]] = []
        self.transition = Transition(
            engine,
            job,  # type: ignore[arg-type]
            graph,
            Boundary(_STEP, plan, _COUNTERS, 7),
            TransitionSets(engine, self._staging, graph, job.sources, step=_STEP, committed=None),  # type: ignore[arg-type]
            memory=memory,
            speeds=None,
            write_record=self.records.append,
        )

    def run(self, submit: Submit, limit_s: float) -> dict[str, Any]:
        """Carry the transition out; return its line of transitions.jsonl.

        Raises:
            TimeoutError: it hangs; the engine takes no more commands.
        """
        ended = SimpleNamespace(line=None, error=None)

        def carry_out() -> None:
            try:
                ended.line = self.transition.run(submit)
            except BaseException as error:  # told to whoever waits
                ended.error = error

        thread = threading.Thread(target=carry_out, name="trial", daemon=True)
        thread.start()
        thread.join(limit_s)
        if thread.is_alive():
            self.engine.mark_broken("a trial hangs")
            raise TimeoutError(f"the transition hangs: {[p.id for p in self.graph.primitives]}")
        self._staging.discard_transition_sets()
        if ended.error is not None:
            raise ended.error
        return ended.line

    def check(self) -> None:
        """Check that exactly the new plan's units are there and in force, every element where it belongs."""
        found = run_command(
            self.engine, "end_trial", {device: {} for device in self.engine.pids()}, label="end", step=_STEP
        )
        for device, (wrong, force) in found.items():
            wanted = {UnitKey.of(unit) for unit in emus_of(self.graph.target) if device in unit.devices}
            assert wrong == dict.fromkeys(wanted, 0), f"device {device}: {wrong}"
            assert {key for key, _, _ in force.values()} == wanted
            assert all(is_over for _, _, is_over in force.values())


_seeds = itertools.count()


class Account:
    """What is free on each device, as primitives start and end; the bytes are those that the graph reserves."""

    def __init__(self, graph: TransitionGraph) -> None:
        self._free, self._lock = dict(graph.free_bytes), threading.Lock()
        self.failures: list[str] = []

    def start(self, primitive: Primitive) -> None:
        """Take what a primitive needs; note where it isn't there, and it would have to wait."""
        with self._lock:
            for device, (peak, _) in primitive.memory.items():
                self._free[device] -= peak
                if peak and self._free[device] < 0:
                    self.failures.append(f"{primitive.id} lacks {-self._free[device]} bytes on device {device}")

    def end(self, primitive: Primitive) -> None:
        with self._lock:
            for device, (peak, held) in primitive.memory.items():
                self._free[device] += peak - held


def by_edges(primitives: Sequence[Primitive]) -> list[Primitive]:
    """Return primitives in an order in which none comes before what it waits for."""
    done, left, ordered = set[str](), list(primitives), list[Primitive]()
    while left:
        ready = [p for p in left if done.issuperset((*p.depends_on, *p.streams))]
        assert ready, f"a circle of edges: {[p.id for p in left]}"
        ordered += ready
        done.update(p.id for p in ready)
        left = [p for p in left if p.id not in done]
    return ordered
