"""Latency of a whole step: the critical path of its stages, by stage, model-stage and operation class."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nereus.cluster import Cluster, NodeKind
from nereus.cost.efficiency import Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.moves import staging_operations, weight_sync_operations
from nereus.cost.operations import Array, Operations
from nereus.cost.options import Options
from nereus.cost.phases import generation_operations, inference_operations, training_phase_operations
from nereus.cost.rank_memory import Precision
from nereus.cost.rates import Rates
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, stage_of

COST_STAGES = ("generation", "inference", "training", "weight_sync", "staging")


@dataclass(frozen=True)
class JobSpec:
    """What is trained: per model-stage its model, the load of a step, and how it is computed.

    `interleave` is the number of model chunks a device in the training pipeline (1: plain one forward, one backward).
    `staging` says whether every step's state is staged. A micro-batch of inference or training has `most_micro_batch`
    samples at most (None: as many as memory takes).
    """

    specs: Mapping[str, ModelSpec] = field(hash=False)
    load: StepLoad
    precision: Precision = "bfloat16"
    interleave: int = 1
    staging: bool = True
    most_micro_batch: int | None = None

    @property
    def has_critic(self) -> bool:
        return "critic.training" in self.specs

    def check_positions(self) -> None:
        """Raise ValueError when a prompt with its response needs more positions than a model has."""
        load = self.load
        for name, spec in self.specs.items():
            if load.prompt_tokens + load.response_tokens_p95 > spec.max_positions:
                raise ValueError(
                    f"workload: prompts of {load.prompt_tokens:g} and responses of up to {load.response_tokens_p95:g} "
                    f"tokens are more than the {spec.max_positions} positions of {name}; shorten them."
                )


@dataclass(frozen=True)
class StageCost:
    """Seconds of one model-stage for each option, by phase: "generation", "inference" or "training".

    `operations` holds what they are made of. Training model-stages have an inference phase too: old log-probs, values.
    """

    seconds: Mapping[str, Array]
    operations: Mapping[str, Operations]


@dataclass(frozen=True)
class StepCost:
    """Latency of a step in seconds: in all, with what no stage has, by stage, and by (model-stage, phase) and class.

    `model_stages_s` are keyed such as "actor.training/inference"; those of one stage may run at the same time, so
    they add up to more than the stage. `classes_s` has under the same keys the seconds by operation class and "host".
    """

    total_s: float
    stages_s: Mapping[str, float]
    model_stages_s: Mapping[str, float]
    classes_s: Mapping[str, Mapping[str, float]]

    def to_record(self) -> dict[str, Any]:
        return {
            "total_s": self.total_s,
            "stages_s": dict(self.stages_s),
            "model_stages_s": dict(self.model_stages_s),
            "classes_s": {name: dict(classes) for name, classes in self.classes_s.items()},
        }


def phases_of(model_stage: str) -> tuple[str, ...]:
    """Return the phases of a model-stage in the order of a step."""
    stage = stage_of(model_stage)
    return ("inference", "training") if stage == "training" else (stage,)


def estimate_operations(model_stage: str, phase: str, options: Options, job: JobSpec, kind: NodeKind) -> Operations:
    """Return the operations of one phase of a model-stage for each option, on its slowest replica."""
    spec, rates = job.specs[model_stage], Rates(kind, job.precision)
    if phase == "generation":
        return generation_operations(spec, options, job.load, rates)
    if phase == "inference":
        return inference_operations(spec, options, job.load, rates)
    return training_phase_operations(spec, options, job.load, rates, interleave=job.interleave)


def estimate_stage(
    model_stage: str,
    options: Options,
    job: JobSpec,
    kind: NodeKind,
    efficiencies: Efficiencies,
    *,
    slowdown: Array | float = 1.0,
) -> StageCost:
    """Return the seconds of a model-stage for each option.

    Args:
        slowdown: of the slowest device, one for all options or one each.
    """
    operations = {
        phase: estimate_operations(model_stage, phase, options, job, kind) for phase in phases_of(model_stage)
    }
    seconds = {phase: ops.total_s(efficiencies, slowdown) for phase, ops in operations.items()}
    return StageCost(seconds, operations)


def step_operations(plan: Plan, job: JobSpec, cluster: Cluster) -> dict[str, Operations]:
    """Return what a step of a plan is made of, as scalars, keyed such as "actor.training/inference".

    "weight_sync" and "staging" are keys of their own; staging's operations are those of the write, of which only the
    part that nothing hides is a pause.
    """
    result = {}
    for name, stage in plan.items():
        options = Options.of_stage(stage, cluster)
        for phase in phases_of(name):
            result[f"{name}/{phase}"] = estimate_operations(name, phase, options, job, cluster.kind).pick(0)
    rates = Rates(cluster.kind, job.precision)
    if "actor.training" in plan and "actor.generation" in plan:
        training, generation = plan["actor.training"], plan["actor.generation"]
        spec = job.specs["actor.training"]
        result["weight_sync"] = weight_sync_operations(spec, training, generation, cluster, rates)
    trained = {name: job.specs[name] for name in plan if stage_of(name) == "training"}
    if job.staging and trained:
        devices = tuple({device for name in trained for device in plan[name].devices})
        result["staging"] = staging_operations(trained, devices, cluster, rates)
    return result


def estimate_step(plan: Plan, job: JobSpec, cluster: Cluster, efficiencies: Efficiencies) -> StepCost:
    """Return the latency of a step under a plan.

    Stages run in order. In a stage, a model-stage starts when those before it (in the order of the plan) that share a
    device with it have ended. Staging is written behind generation and inference; what is left of it is a pause.
    """
    classes_s: dict[str, dict[str, float]] = {}
    for key, operations in step_operations(plan, job, cluster).items():
        name = key.split("/")[0]
        slowdown = efficiencies.slowdown(plan[name].devices) if name in plan else 1.0
        classes_s[key] = {cls: float(s) for cls, s in operations.seconds(efficiencies, slowdown).items()}
    seconds = {key: sum(classes.values()) for key, classes in classes_s.items()}
    stages_s = combine_tasks(plan, seconds)
    return StepCost(sum(stages_s.values()) + efficiencies.step_s, stages_s, seconds, classes_s)


def combine_tasks(plan: Plan, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of a step's stages from those of its tasks, keyed as in `step_operations`; see above."""
    devices = {name: frozenset(stage.devices) for name, stage in plan.items()}
    stages_s = {phase: _makespan(devices, seconds, phase) for phase in ("generation", "inference", "training")}
    stages_s["weight_sync"] = seconds.get("weight_sync", 0.0)
    hidden = stages_s["generation"] + stages_s["inference"]
    stages_s["staging"] = max(0.0, seconds.get("staging", 0.0) - hidden)
    return stages_s


def _makespan(devices: Mapping[str, Collection[int]], seconds: Mapping[str, float], phase: str) -> float:
    running = [name for name in devices if f"{name}/{phase}" in seconds]
    return makespan([devices[name] for name in running], [seconds[f"{name}/{phase}"] for name in running])


def makespan(devices: Sequence[Collection[int]], seconds: Sequence[float]) -> float:
    """Return when the last of some tasks ends, if each starts as soon as those before it that share a device ended."""
    used = [ids if isinstance(ids, frozenset) else frozenset(ids) for ids in devices]
    ends: list[float] = []
    for ids, duration in zip(used, seconds, strict=True):
        before = [end for other, end in zip(used, ends, strict=False) if not ids.isdisjoint(other)]
        ends.append(max(before, default=0.0) + duration)
    return max(ends, default=0.0)
