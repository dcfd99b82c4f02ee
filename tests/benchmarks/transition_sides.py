"""Our side of the benchmark of transitions: two workers whose plan changes as in a run, and raw transfers."""

from __future__ import annotations

import mmap
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, cast

from nereus.layout import Layout, slices_of
from nereus.model.spec import tensors
from nereus.plan import Plan
from nereus.runtime.model_stages import next_epoch
from nereus.runtime.probe import measure_speeds
from nereus.runtime.rank_state import Counters
from nereus.runtime.staging import Staging
from nereus.runtime.transition import Boundary, Transition
from nereus.runtime.transition_sets import TransitionSets
from nereus.staged_state import PREFIXES, STAGED, ShardOrder, plan_shards
from nereus.transition.copies import copies_of
from nereus.transition.critical_path import moves_seconds, price_graph
from nereus.transition.execute import on_threads
from nereus.transition.graph import plan_transition
from nereus.transition.primitives import Primitive, TransitionGraph
from storage.journal import Journal
from storage.owner import Owner
from tests.benchmarks.bench_job import open_workers

SERVICE = "tests.benchmarks.transition_service:MovingRank"
STAGE, GENERATION = "actor.training", "actor.generation"
OTHERS: dict[str, Any] = {GENERATION: {}, "critic.training": {}, "reference.inference": {}}
RANKS = 2
Sample = dict[str, float]


def touch_memory(num_bytes: int = 4 << 30) -> None:
    """Have the system give us free memory once, and take it back.

    On a virtual machine, the host may have reclaimed what was free for two seconds or more (free page reporting): then
    the next to use it would be billed for getting it back, 3 times as long as for new pages else.
    """
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, num_bytes, mmap.PAGESIZE):
            memory[start] = 1


@dataclass(frozen=True)
class _Driver:
    """What staging needs to know of whoever drives a run."""

    journal: Journal
    number: int = 1


class _TimedTransition(Transition):
    """Knows what each kind of command took."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.seconds: dict[str, float] = defaultdict(float)

    def _run(self, label: str, method: str, kwargs: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        begun = time.perf_counter()
        try:
            return super()._run(label, method, kwargs)
        finally:
            self.seconds[method] += time.perf_counter() - begun


class Ours:
    """Two workers that hold a training model-stage, and what of a driver changes its plan."""

    def __init__(self, model: str | Mapping[str, Any], layouts: Mapping[str, Mapping[str, int]], folder: str) -> None:
        """Remember what is measured.

        Args:
            model: a directory, or sizes of a random model.
            layouts: of actor.training, by name; the first is that of the start.
            folder: where the run's journal and staged sets lie.
        """
        self._model, self._layouts, self._folder = model, layouts, folder
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack as stack:
            sizes: dict[str, Any] = {"devices": RANKS, "threads": 1, "gib": 16}
            plans = [[step, {STAGE: layout, **OTHERS}] for step, layout in enumerate(self._layouts.values())]
            opened = open_workers(self._model, service=SERVICE, **sizes, plan=plans, precision="float32")
            self.workers = stack.enter_context(opened)
            self._pool = stack.enter_context(ThreadPoolExecutor(8))
            job, engine = self.workers.job, self.workers.engine
            self.plan, self._memory = job.plan, job.transition_memory
            self._plans: dict[str, Plan] = {
                name: plan for name, (_, plan) in zip(self._layouts, job.schedule, strict=True)
            }
            epoch = self.workers.build([STAGE, GENERATION])
            stages = {"training": self.plan[STAGE], "generation": self.plan[GENERATION]}
            devices = sorted({*self.plan[STAGE].devices, *self.plan[GENERATION].devices})
            self.workers.run("connect_sync", {device: {"epoch": epoch, **stages} for device in devices})
            self._on_all("connect_raw", devices=list(range(RANKS)), epoch=next_epoch())
            self._driver = _Driver(Journal(self._folder))
            self._staging = Staging(
                engine,
                cast(Owner, self._driver),
                f"{self._folder}/state",
                self._hold_shards(),
                run_id="benchmark",
                keep=1,
                lease_s=30.0,
                spare_bytes=dict.fromkeys(range(RANKS), 0),
            )
            self._fill()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _on_all(self, method: str, **arguments: Any) -> dict[int, Any]:
        return self.workers.run(method, dict.fromkeys(range(RANKS), arguments))

    def _on_holders(self, method: str) -> dict[int, Any]:
        return self.workers.run(method, {device: {"model_stage": STAGE} for device in self.plan[STAGE].devices})

    def _fill(self) -> None:
        self._on_holders("fill")

    def check(self) -> None:
        """Check that every element is the one that was there before the first move."""
        assert set(self._on_holders("count_differing").values()) == {0}

    def _hold_shards(self) -> dict[int, tuple[ShardOrder, ...]]:
        all_orders = plan_shards(self.plan, self.workers.job.specs, element_bytes=4)
        orders = {device: tuple(o for o in held if o.group == STAGE) for device, held in all_orders.items()}
        self.workers.run("hold_shards", {device: {"orders": orders.get(device, ())} for device in range(RANKS)})
        return orders

    # A change of the plan

    def move(
        self, layout: str, transport: Literal["direct", "staged"], *, shared_memory: bool = True
    ) -> tuple[Sample, TransitionGraph]:
        """Change the layout of actor.training as a run does; return seconds, predicted ones too, and the graph.

        `seconds` is the whole; `move_s` from the first primitive's start to the last one's end before the commit.
        """
        job, engine = self.workers.job, self.workers.engine
        self._on_all("choose_links", shared_memory=shared_memory)
        touch_memory()
        speeds = measure_speeds(engine, range(RANKS), self._folder, device_type="cpu", same_host=shared_memory)
        times: list[tuple[float, float]] = []
        begun = time.perf_counter()
        graph = plan_transition(self.plan, self._plans[layout], self._memory, transport=transport, speeds=speeds)
        planned = time.perf_counter()
        transition = _TimedTransition(
            engine,
            job,
            graph,
            Boundary(0, self.plan, dict.fromkeys(STAGED, Counters()), 0),
            TransitionSets(engine, self._staging, graph, job.sources, step=0, committed=None),
            memory=self._memory,
            speeds=speeds,
            write_record=lambda body: self._append(body),
        )

        def run(primitive: Primitive) -> dict[str, Any]:
            started = time.perf_counter()
            result = transition.run_primitive(primitive.id)
            if not primitive.after_commit:
                times.append((started, time.perf_counter()))
            return result

        line = transition.run(on_threads(self._pool, run))
        seconds = time.perf_counter() - begun
        assert line["outcome"] == "committed" and line["verified"], line
        self.plan = graph.target
        transition.discard_sets()
        self._staging.adopt(self._hold_shards(), dict.fromkeys(range(RANKS), 0))
        return {
            "seconds": seconds,
            "move_s": max(end for _, end in times) - min(start for start, _ in times) if times else 0.0,
            "price_s": price_graph(graph, self._memory, speeds),
            "price_move_s": moves_seconds(graph, self._memory, speeds),
            "plan_transition_s": planned - begun,
            **{f"{method}_s": passed for method, passed in transition.seconds.items()},
        }, graph

    def _append(self, body: dict[str, Any]) -> None:
        self._driver.journal.append("transition", body)

    # Raw transfers

    def exchange(self, way: str, traffic: Mapping[tuple[int, int], int]) -> float:
        """Return the seconds of moving as many bytes between prepared buffers, by pair of devices."""
        kwargs = {
            device: {
                "way": way,
                "sends": {t: n for (s, t), n in traffic.items() if s == device != t},
                "receives": {s: n for (s, t), n in traffic.items() if t == device != s},
                "local": traffic.get((device, device), 0),
            }
            for device in range(RANKS)
        }
        begun = time.perf_counter()
        self.workers.run("exchange", kwargs)
        return time.perf_counter() - begun

    def traffic(self, graph: TransitionGraph) -> dict[tuple[int, int], int]:
        """Return the bytes of a graph by pair of devices (source, target); equal ones stay inside a device."""
        sums: dict[tuple[int, int], int] = defaultdict(int)
        for primitive in graph.primitives:
            if primitive.makes and primitive.transport != "staged":
                for copy in copies_of(primitive, self._memory.specs):
                    element_bytes = self._memory.element_bytes(primitive.model_stage)
                    sums[copy.source, copy.target] += copy.slice.num_elements * element_bytes
        return dict(sums)

    def describe(self, layouts: Mapping[str, Layout | None], store: str) -> dict[str, Any]:
        """Return what `MovingPeer` needs to hold the same tensors; a layout of None: only rank 1 has the whole."""
        spec = self._memory.specs[STAGE]
        infos = tensors(spec).values()
        shapes = {
            prefix + info.name: [list(info.shape), None if info.split is None else info.split.dim]
            for prefix in PREFIXES
            for info in infos
        }

        def held(layout: Layout | None, rank: int) -> dict[str, str]:
            if layout is None:
                return dict.fromkeys(shapes, "whole") if rank == 1 else {}
            if rank >= layout.size:
                return {}
            names = {part.name for part in slices_of(spec, layout, rank)}
            how = "split" if layout.tp > 1 else "whole"
            return {prefix + name: how for prefix in PREFIXES for name in sorted(names)}

        return {
            "tensors": shapes,
            "layouts": {name: [held(layout, rank) for rank in range(RANKS)] for name, layout in layouts.items()},
            "store": store,
        }
