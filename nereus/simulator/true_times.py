"""What the tasks of a step really take under many plans at once: the same as one by one, in a tenth of the time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from nereus.cost.moves import staging_operations, weight_sync_operations
from nereus.cost.options import Options
from nereus.cost.rates import Rates
from nereus.cost.step import estimate_operations, phases_of
from nereus.plan import Plan, StagePlan, stage_of
from nereus.simulator.world import World


class TrueTimes:
    """Times in one world, without noise; what doesn't depend on a step's load is worked out once."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._options: dict[tuple[Any, StagePlan], Options] = {}
        self._moves: dict[Any, float] = {}

    def of(self, step: int, plans: Sequence[Plan]) -> list[dict[str, float]]:
        """Return by plan the seconds of each task, keyed such as "actor.training/inference"."""
        result: list[dict[str, float]] = [{} for _ in plans]
        if not plans:
            return result
        for name in plans[0]:
            stages = [plan[name] for plan in plans]
            for phase, seconds in self._stage(step, name, stages).items():
                for tasks, duration in zip(result, seconds, strict=True):
                    tasks[f"{name}/{phase}"] = duration
        for tasks, plan in zip(result, plans, strict=True):
            tasks["weight_sync"] = self._weight_sync(step, plan)
            tasks["staging"] = self._staging(step, plan)
        return result

    def _stage(self, step: int, name: str, stages: Sequence[StagePlan]) -> dict[str, list[float]]:
        world, cluster = self._world, self._world.true_cluster(step)
        efficiencies, job = world.efficiencies(step), world.job(step)
        distinct = {stage: index for index, stage in enumerate(dict.fromkeys(stages))}
        options = _joined([self._options_of(step, stage) for stage in distinct])
        slowdown = np.array([efficiencies.slowdown(stage.devices) for stage in distinct])
        found = {}
        for phase in phases_of(name):
            operations = estimate_operations(name, phase, options, job, cluster.kind)
            seconds = np.broadcast_to(operations.total_s(efficiencies, slowdown), len(distinct)).tolist()
            found[phase] = [seconds[distinct[stage]] for stage in stages]
        return found

    def _options_of(self, step: int, stage: StagePlan) -> Options:
        cluster = self._world.true_cluster(step)
        key = (cluster.kind, stage)
        if key not in self._options:
            self._options[key] = Options.of_stage(stage, cluster)
        return self._options[key]

    def _weight_sync(self, step: int, plan: Plan) -> float:
        cluster, job = self._world.true_cluster(step), self._world.job(step)
        training, generation = plan["actor.training"], plan["actor.generation"]
        key = (cluster.kind, training.layout, training.devices, generation.layout, generation.devices)
        if key not in self._moves:
            rates = Rates(cluster.kind, job.precision)
            operations = weight_sync_operations(job.specs["actor.training"], training, generation, cluster, rates)
            self._moves[key] = float(operations.total_s(self._world.efficiencies(step)))
        return self._moves[key]

    def _staging(self, step: int, plan: Plan) -> float:
        cluster, job = self._world.true_cluster(step), self._world.job(step)
        trained = {name: job.specs[name] for name in plan if stage_of(name) == "training"}
        devices = tuple(sorted({device for name in trained for device in plan[name].devices}))
        key = (cluster.kind, devices)
        if key not in self._moves:
            operations = staging_operations(trained, devices, cluster, Rates(cluster.kind, job.precision))
            self._moves[key] = float(operations.total_s(self._world.efficiencies(step)))
        return self._moves[key]


def _joined(options: Sequence[Options]) -> Options:
    """Return several options of one stage as arrays."""
    return Options(*(np.concatenate([getattr(one, field.name) for one in options]) for field in fields(Options)))
