"""The plan space as a mixed-integer program, solved by HiGHS: an independent judge of the search on larger instances.

One column for every training pair, generation and inference pair with every choice that no other one beats; one
column of each kind is picked. Rows: memory on every device for the phase that runs there, and the ends of the four
inference tasks, with a binary for each two that overlap or not. Buffers of the weight sync depend on two columns: rows
for them are added where a solution lacks room for them, until one has it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, lil_array

from nereus.cost.memory import PlanMemory
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, Plan, StagePlan, stage_of
from nereus.planner.setting import Setting
from tests.planner.exhaustive import Exhaustive, sizes_of

# Memory is counted in MiB, for the sake of the solver's tolerances.
_UNIT = 2.0**20


@dataclass(frozen=True)
class Option:
    """One model-stage with a layout, dp and choice, on a block from `start` on: bytes by device, seconds by phase."""

    stage: StagePlan
    start: int
    held: NDArray[np.int64]
    need: NDArray[np.int64]
    seconds: dict[str, float]

    @property
    def end(self) -> int:
        return self.start + len(self.stage.devices)


@dataclass(frozen=True)
class Column:
    """What is picked at once: one or two options of a stage."""

    first: Option
    second: Option | None

    @property
    def options(self) -> list[Option]:
        return [self.first] if self.second is None else [self.first, self.second]

    @property
    def beside(self) -> bool:
        return self.second is not None and self.second.start > 0

    def held(self) -> NDArray[np.int64]:
        return np.sum([option.held for option in self.options], axis=0)

    def need(self) -> NDArray[np.int64]:
        return np.max([option.need for option in self.options], axis=0)

    def seconds(self, phase: str) -> float:
        each = [option.seconds[phase] for option in self.options]
        return max(each) if self.beside else sum(each)


class PlanProgram:
    """The program of one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.facts = setting, Exhaustive(setting)
        self.groups = [self._columns(stage) for stage in ("training", "generation", "inference")]
        self.num = len(setting.cluster.devices)

    def solve(self, *, time_limit_s: float, gap: float = 1e-3) -> tuple[float, float]:
        """Return (seconds of the best solution, proven lower bound); both infinite when there is no plan."""
        if any(not columns for columns in self.groups):
            return np.inf, np.inf
        counts = [len(columns) for columns in self.groups]
        # After the columns: sync, end of inference, all before training, 4 ends, 4 overlaps, bytes held by device.
        self.begin = np.cumsum([0, *counts])
        self.sync, self.inference, self.before = (self.begin[-1] + i for i in range(3))
        self.ends = [self.begin[-1] + 3 + i for i in range(4)]
        self.meets = [self.begin[-1] + 7 + i for i in range(4)]
        self.holds = [self.begin[-1] + 11 + i for i in range(self.num)]
        self.size = int(self.begin[-1]) + 11 + self.num
        self.rows: list[tuple[dict[int, float], float, float]] = []
        self._pick_one()
        self._memory()
        self._inference_stage()
        self._sync()
        until = time.monotonic() + time_limit_s
        while True:
            result = self._run(max(1.0, until - time.monotonic()), gap)
            if result.x is None:
                return np.inf, np.inf if result.status == 2 else float(result.mip_dual_bound or 0.0)
            if not self._add_sync_rows(result.x):
                return float(result.fun), float(result.mip_dual_bound)

    def _run(self, time_limit_s: float, gap: float):
        cost = np.zeros(self.size)
        cost[: self.begin[1]] = [column.seconds("training") for column in self.groups[0]]
        cost[[self.sync, self.before]] = 1.0
        whole = np.zeros(self.size)
        whole[: self.begin[-1]] = 1
        whole[self.meets] = 1
        upper = np.full(self.size, np.inf)
        upper[: self.begin[-1]] = 1
        upper[self.meets] = 1
        matrix = lil_array((len(self.rows), self.size))
        for index, (row, _, _) in enumerate(self.rows):
            matrix[index, list(row)] = list(row.values())
        limits = LinearConstraint(csr_array(matrix), [r[1] for r in self.rows], [r[2] for r in self.rows])
        options = {"time_limit": time_limit_s, "mip_rel_gap": gap}
        return milp(cost, constraints=limits, integrality=whole, bounds=Bounds(0, upper), options=options)

    def _add_sync_rows(self, x: NDArray[np.float64]) -> bool:
        """Add rows for the buffers between the training that was picked and every generation, if they lack room.

        Returns:
            whether they lack it.
        """
        training, generation = (
            self.groups[group][int(np.argmax(x[self.begin[group] : self.begin[group + 1]]))].first.stage
            for group in (0, 1)
        )
        usable = [self.facts.usable()[device] / _UNIT for device in self.setting.cluster.device_ids]
        need = self._sync_need(training, generation)
        if all(x[hold] + n <= u * (1 + 1e-9) for hold, n, u in zip(self.holds, need, usable, strict=True)):
            return False
        of_training = self._placed_like(0, training)
        for target in {(c.first.stage.layout, c.first.stage.dp): c.first.stage for c in self.groups[1]}.values():
            of_both = of_training + self._placed_like(1, target)
            for hold, n, u in zip(self.holds, self._sync_need(training, target), usable, strict=True):
                # The need counts where both placements are picked.
                self.rows.append(({hold: 1.0} | dict.fromkeys(of_both, n), -np.inf, u + n))
        return True

    def _sync_need(self, training: StagePlan, generation: StagePlan) -> list[float]:
        plan = Plan.of({"actor.generation": generation, "actor.training": training})
        setting = self.setting
        memory = PlanMemory(plan, setting.job.specs, setting.workload, setting.job.precision)
        return [
            sum(memory.phases(device)["weight sync"].values()) / _UNIT if device in plan.devices else 0.0
            for device in setting.cluster.device_ids
        ]

    def _placed_like(self, group: int, stage: StagePlan) -> list[int]:
        """Return the columns whose first option is placed like a stage."""
        return [
            int(self.begin[group]) + index
            for index, column in enumerate(self.groups[group])
            if (column.first.stage.layout, column.first.stage.dp) == (stage.layout, stage.dp)
        ]

    def _pick_one(self) -> None:
        for group in range(3):
            columns = range(*self.begin[group : group + 2])
            self.rows.append((dict.fromkeys(columns, 1.0), 1, 1))

    def _memory(self) -> None:
        """On every device, for each group: what all hold and what the group's phase needs there fits."""
        setting = self.setting
        usable = self.facts.usable()
        held = [np.array([c.held() for c in columns]) / _UNIT for columns in self.groups]
        need = [np.array([c.need() for c in columns]) / _UNIT for columns in self.groups]
        buffers = setting.workload.staging_buffer_bytes / _UNIT
        trained = np.array([[any(o.held[d] for o in c.options) for d in range(self.num)] for c in self.groups[0]])
        held[0] = held[0] + trained * buffers
        for position, hold in enumerate(self.holds):
            row = {i: -float(h) for i, h in enumerate(np.concatenate(held)[:, position]) if h}
            self.rows.append((row | {hold: 1.0}, 0, 0))
        for position, device in enumerate(setting.cluster.device_ids):
            for group in range(3):
                row: dict[int, float] = {}
                for other in range(3):
                    bytes_ = held[other][:, position] + (need[other][:, position] if other == group else 0.0)
                    row |= {int(self.begin[other]) + i: float(b) for i, b in enumerate(bytes_) if b}
                self.rows.append((row, -np.inf, usable[device] / _UNIT))

    def _inference_stage(self) -> None:
        # More than all four tasks one after the other.
        longest = [max(o.seconds["inference"] for c in self.groups[g] for o in c.options) for g in (0, 2)]
        big = 2.0 * sum(longest)

        def weigh(group: int, value) -> dict[int, float]:
            return {int(self.begin[group]) + i: float(value(c)) for i, c in enumerate(self.groups[group])}

        def add(*parts: dict[int, float]) -> dict[int, float]:
            total: dict[int, float] = {}
            for part in parts:
                for key, number in part.items():
                    total[key] = total.get(key, 0.0) + number
            return total

        def minus(row: dict[int, float]) -> dict[int, float]:
            return {key: -number for key, number in row.items()}

        def of(option: Option | None) -> float:
            return 0.0 if option is None else option.seconds["inference"]

        actor, critic, first, second = self.ends
        # Old log-probs, then values: their overlap is known from the column.
        self.rows.append((add({actor: 1.0}, minus(weigh(0, lambda c: of(c.first)))), 0, np.inf))
        values = weigh(0, lambda c: of(c.second) + (0.0 if c.beside or c.second is None else of(c.first)))
        self.rows.append((add({critic: 1.0}, minus(values)), 0, np.inf))
        on_critic, on_actor, begins_before, ends_behind = self.meets
        critic_start = weigh(0, lambda c: self.num if c.second is None else c.second.start)
        critic_end = weigh(0, lambda c: 0 if c.second is None else c.second.end)
        second_start = weigh(2, lambda c: 0 if c.second is None else c.second.start)
        second_end = weigh(2, lambda c: 0 if c.second is None else c.second.end)
        # num * flag >= by how much one reaches into the other, so the flag is 1 where they meet.
        for flag, reach in (
            (on_critic, add(weigh(2, lambda c: c.first.end), minus(critic_start))),
            (on_actor, add(weigh(0, lambda c: c.first.end), minus(second_start))),
            (begins_before, add(critic_end, minus(second_start))),
            (ends_behind, add(second_end, minus(critic_start))),
        ):
            self.rows.append((add({flag: float(self.num)}, minus(reach)), 0, np.inf))
        duration = minus(weigh(2, lambda c: of(c.first)))
        self.rows.append((add({first: 1.0, actor: -1.0}, duration), 0, np.inf))
        self.rows.append((add({first: 1.0, critic: -1.0, on_critic: -big}, duration), -big, np.inf))
        duration = minus(weigh(2, lambda c: of(c.second)))
        both = {second: 1.0, critic: -1.0, begins_before: -big, ends_behind: -big}
        serial = minus(weigh(2, lambda c: 0.0 if c.beside else big))
        self.rows.append((add({second: 1.0}, duration), 0, np.inf))
        self.rows.append((add({second: 1.0, actor: -1.0, on_actor: -big}, duration), -big, np.inf))
        self.rows.append((add(both, duration), -2 * big, np.inf))
        self.rows.append((add({second: 1.0, first: -1.0}, duration, serial), -big, np.inf))
        for end in self.ends:
            self.rows.append(({self.inference: 1.0, end: -1.0}, 0, np.inf))
        generations = weigh(1, lambda c: c.first.seconds["generation"])
        self.rows.append((add({self.before: 1.0, self.inference: -1.0}, minus(generations)), 0, np.inf))
        staging = weigh(0, lambda c: self.facts.staging_s([o.stage for o in c.options]))
        self.rows.append((add({self.before: 1.0}, minus(staging)), 0, np.inf))

    def _sync(self) -> None:
        """For each placement of generation: the sync takes as long as training's column says, if it is picked."""
        training, generation, _ = self.groups
        by_place: dict[tuple, list[int]] = {}
        for index, column in enumerate(generation):
            by_place.setdefault((column.first.stage.layout, column.first.stage.dp), []).append(index)
        for members in by_place.values():
            target = generation[members[0]].first.stage
            seconds = [self.facts.sync_s(column.first.stage, target) for column in training]
            big = max(seconds)
            row = {self.sync: 1.0}
            row |= {i: -s for i, s in enumerate(seconds) if s}
            row |= {int(self.begin[1]) + i: -big for i in members}
            self.rows.append((row, -big, np.inf))

    def _columns(self, stage: str) -> list[Column]:
        names = [n for n in MODEL_STAGES if n in self.setting.job.specs and stage_of(n) == stage]
        num = len(self.setting.cluster.devices)
        if not names:
            nothing = np.zeros(num, dtype=np.int64)
            return [Column(Option(StagePlan(1, Layout(), (), 1), 0, nothing, nothing, {stage: 0.0}), None)]
        columns: list[Column] = []
        firsts = [o for dp, layout in sizes_of(self.setting, names[0]) for o in self._options(names[0], dp, layout, 0)]
        if len(names) == 1:
            return [Column(option, None) for option in firsts]
        for start in range(num):
            seconds = [
                o
                for dp, layout in sizes_of(self.setting, names[1])
                if start + dp * layout.size <= num
                for o in self._options(names[1], dp, layout, start)
            ]
            columns += [Column(one, two) for one in firsts if start in (0, one.end) for two in seconds]
        return columns

    def _options(self, name: str, dp: int, layout: Layout, start: int) -> list[Option]:
        """Return the choices of one placement that no other one beats in memory and all seconds."""
        ids = self.setting.cluster.device_ids
        block = slice(start, start + dp * layout.size)
        stage = StagePlan(dp, layout, ids[block], 1)
        held = np.zeros(len(ids), dtype=np.int64)
        held[block] = np.tile(self.facts.resident(name, stage), dp)
        found: list[Option] = []
        for (size, again), needs in self.facts.all_needs(name, stage):
            seconds = self.facts.phase_seconds(name, stage, size, again)
            need = np.zeros(len(ids), dtype=np.int64)
            need[block] = np.tile(needs, dp)
            found.append(Option(stage, start, held, need, seconds))
        return [
            one
            for i, one in enumerate(found)
            if not any(_beats(two, one) and (not _beats(one, two) or j < i) for j, two in enumerate(found) if i != j)
        ]


def _beats(one: Option, two: Option) -> bool:
    return bool((one.need <= two.need).all()) and all(one.seconds[p] <= s for p, s in two.seconds.items())
