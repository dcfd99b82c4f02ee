"""The plan space by brute force: every placement, every choice, in plain Python on the public cost and memory models.

Blocks: in each stage the model-stages occupy consecutive blocks from the first device on, in their order, or each its
part of one block from the first device on, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from nereus.cost.memory import USABLE_SHARE, PlanMemory
from nereus.cost.moves import staging_operations, weight_sync_operations
from nereus.cost.options import Options
from nereus.cost.rank_memory import estimate_rank
from nereus.cost.rates import Rates
from nereus.cost.step import estimate_stage, makespan
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, Plan, StagePlan, stage_of
from nereus.planner.setting import Setting


def all_placements(setting: Setting) -> Iterator[Plan]:
    """Yield every placement of the space, micro-batches left at 1."""
    by_stage = [_stage_placements(setting, stage) for stage in ("generation", "inference", "training")]
    for parts in itertools.product(*by_stage):
        yield Plan.of({name: stage for part in parts for name, stage in part.items()})


def _stage_placements(setting: Setting, stage: str) -> list[dict[str, StagePlan]]:
    names = [name for name in MODEL_STAGES if name in setting.job.specs and stage_of(name) == stage]
    ids = setting.cluster.device_ids
    found = []
    for sizes in itertools.product(*(sizes_of(setting, name) for name in names)):
        starts = [[0] * len(names)]
        if len(names) == 2:
            starts.append([0, sizes[0][0] * sizes[0][1].size])
        for start in starts:
            part = {
                name: StagePlan(dp, layout, ids[first : first + dp * layout.size], 1)
                for name, first, (dp, layout) in zip(names, start, sizes, strict=True)
            }
            if all(len(s.devices) == s.dp * s.layout.size for s in part.values()):
                found.append(part)
    return found


def sizes_of(setting: Setting, name: str) -> list[tuple[int, Layout]]:
    """Return every dp and layout of a model-stage."""
    spec, num = setting.job.specs[name], len(setting.cluster.devices)
    load = setting.job.load
    most = load.smallest_minibatch_samples if stage_of(name) == "training" else load.samples
    layouts = [
        Layout(tp, pp)
        for tp in range(1, min(spec.kv_heads, num) + 1)
        for pp in range(1, min(spec.layers, num) + 1)
        if tp * pp <= num
    ]
    return [(dp, layout) for layout in layouts for dp in range(1, min(most, num // layout.size) + 1)]


@dataclass
class Exhaustive:
    """The fastest step of one setting by brute force, with everything that repeats looked up."""

    setting: Setting
    _needs: dict = field(default_factory=dict)
    _seconds: dict = field(default_factory=dict)
    _syncs: dict = field(default_factory=dict)
    _residents: dict = field(default_factory=dict)
    _ideals: dict = field(default_factory=dict)
    _stagings: dict = field(default_factory=dict)

    def best(self) -> tuple[float, Plan] | None:
        """Return the least seconds of a step and a placement that reaches them; None where nothing fits."""
        best: tuple[float, Plan] | None = None
        for plan in all_placements(self.setting):
            limit = best[0] if best else float("inf")
            seconds = self.step_s(plan, limit)
            if seconds is not None and seconds < limit:
                best = (seconds, plan)
        return best

    def step_s(self, plan: Plan, limit: float) -> float | None:
        """Return the least seconds over all choices, or None where none fits or it is plain that `limit` is passed."""
        if self._total(plan, tuple(self._ideal(name, stage) for name, stage in plan.items())) >= limit:
            return None
        setting = self.setting
        usable = self.usable()
        trained = {d for name, s in plan.items() if stage_of(name) == "training" for d in s.devices}
        room = {d: n - (setting.workload.staging_buffer_bytes if d in trained else 0) for d, n in usable.items()}
        for name, stage in plan.items():
            held = self.resident(name, stage)
            for index, device in enumerate(stage.devices):
                room[device] -= held[index % stage.layout.size]
        if min(room[device] for device in plan.devices) < setting.workload.workspace_bytes:
            return None
        choices = []
        for name, stage in plan.items():
            rooms = [min(room[r[i]] for r in stage.replicas) for i in range(stage.layout.size)]
            fitting = self._fitting(name, stage, rooms)
            if not fitting:
                return None
            choices.append(fitting)
        if not self._sync_fits(plan, room):
            return None
        return min(self._total(plan, picks) for picks in itertools.product(*choices))

    def usable(self) -> dict[int, int]:
        """Return the bytes that may be used, by device."""
        setting = self.setting
        return {d: int(n * USABLE_SHARE / setting.memory_factor) for d, n in setting.cluster.capacities.items()}

    def _ideal(self, name: str, stage: StagePlan) -> dict[str, float]:
        """Return the least seconds by phase over all choices, as if memory were no matter."""
        key = (name, stage)
        if key not in self._ideals:
            choices = [self.phase_seconds(name, stage, *choice) for choice, _ in self.all_needs(name, stage)]
            self._ideals[key] = {phase: min(each[phase] for each in choices) for phase in choices[0]}
        return self._ideals[key]

    def resident(self, name: str, stage: StagePlan) -> list[int]:
        key = (name, stage.layout)
        if key not in self._residents:
            self._residents[key] = [
                sum(self._rank(name, stage, rank).resident.values()) for rank in range(stage.layout.size)
            ]
        return self._residents[key]

    def _rank(self, name: str, stage: StagePlan, rank: int):
        setting = self.setting
        return estimate_rank(name, stage, setting.job.specs[name], rank, setting.workload, setting.job.precision)

    def _fitting(self, name: str, stage: StagePlan, rooms: list[int]) -> list[dict[str, float]]:
        """Return the seconds by phase of every choice that fits; of generation, of the most slots."""
        found = []
        for key, needs in self.all_needs(name, stage):
            if all(need <= room for need, room in zip(needs, rooms, strict=True)):
                seconds = self.phase_seconds(name, stage, *key)
                if stage_of(name) == "generation":
                    return [seconds]
                if seconds not in found:
                    found.append(seconds)
        return found

    def all_needs(self, name: str, stage: StagePlan) -> list[tuple[tuple[int, bool], list[int]]]:
        key = (name, stage.layout, stage.dp)
        if key not in self._needs:
            share = self.setting.workload.share(name, stage.dp)
            sizes: list[int] = list(range(share, 0, -1))
            if stage_of(name) != "generation":
                most = self.setting.job.most_micro_batch or share
                first = min(most, -(-share // stage.layout.pp))
                sizes = sorted({-(-first // 2**k) for k in range(first.bit_length() + 1)}, reverse=True)
            flags = (False, True) if stage_of(name) == "training" else (False,)
            self._needs[key] = [((size, flag), self._need(name, stage, size, flag)) for size in sizes for flag in flags]
        return self._needs[key]

    def _need(self, name: str, stage: StagePlan, size: int, flag: bool) -> list[int]:
        chosen = StagePlan(stage.dp, stage.layout, (), size, flag)
        ranks = [self._rank(name, chosen, rank) for rank in range(stage.layout.size)]
        return [max(sum(kinds.values()) for kinds in rank.phases.values()) for rank in ranks]

    def phase_seconds(self, name: str, stage: StagePlan, size: int, flag: bool) -> dict[str, float]:
        key = (name, stage, size, flag)
        if key not in self._seconds:
            setting = self.setting
            options = Options.of_stage(StagePlan(stage.dp, stage.layout, stage.devices, size, flag), setting.cluster)
            slowdown = setting.efficiencies.slowdown(stage.devices)
            kind, speed = setting.cluster.kind, setting.efficiencies
            cost = estimate_stage(name, options, setting.job, kind, speed, slowdown=slowdown)
            self._seconds[key] = {phase: float(seconds[0]) for phase, seconds in cost.seconds.items()}
        return self._seconds[key]

    def _sync_fits(self, plan: Plan, room: dict[int, int]) -> bool:
        setting = self.setting
        memory = PlanMemory(plan, setting.job.specs, setting.workload, setting.job.precision)
        return all(sum(memory.phases(d)["weight sync"].values()) <= room[d] for d in plan.devices)

    def _total(self, plan: Plan, picks: tuple[dict[str, float], ...]) -> float:
        stages = {}
        for phase in ("generation", "inference", "training"):
            running = [(s.devices, p[phase]) for (_, s), p in zip(plan.items(), picks, strict=True) if phase in p]
            stages[phase] = makespan([d for d, _ in running], [s for _, s in running])
        sync_s = self.sync_s(plan["actor.training"], plan["actor.generation"])
        staging_s = self.staging_s([stage for name, stage in plan.items() if stage_of(name) == "training"])
        return max(stages["generation"] + stages["inference"], staging_s) + stages["training"] + sync_s

    def sync_s(self, training: StagePlan, generation: StagePlan) -> float:
        """Return the seconds of the weight sync."""
        setting, key = self.setting, (training, generation)
        if key not in self._syncs:
            rates = Rates(setting.cluster.kind, setting.job.precision)
            sync = weight_sync_operations(setting.job.specs["actor.training"], *key, setting.cluster, rates)
            self._syncs[key] = float(sync.total_s(setting.efficiencies))
        return self._syncs[key]

    def staging_s(self, trained: list[StagePlan]) -> float:
        """Return the seconds of writing the state of all training model-stages, which lie as given."""
        setting, rates = self.setting, Rates(self.setting.cluster.kind, self.setting.job.precision)
        if not setting.job.staging:
            return 0.0
        specs = {name: spec for name, spec in setting.job.specs.items() if stage_of(name) == "training"}
        devices = tuple(sorted({d for stage in trained for d in stage.devices}))
        if devices not in self._stagings:
            writing = staging_operations(specs, devices, setting.cluster, rates)
            self._stagings[devices] = float(writing.total_s(setting.efficiencies))
        return self._stagings[devices]
