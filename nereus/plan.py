"""Model-stages and the global plan: layout, dp, devices, micro-batch and recomputation of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereus.layout import Layout, check_layout
from nereus.model.spec import ModelSpec

# In the order in which blocks of devices are given out and ties are broken.
MODEL_STAGES = (
    "actor.generation",
    "actor.training",
    "critic.training",
    "reference.inference",
    "reward.inference",
)
STAGES = ("generation", "inference", "training")


def role_of(model_stage: str) -> str:
    """Return "actor" of "actor.training"."""
    return model_stage.split(".")[0]


def stage_of(model_stage: str) -> str:
    """Return "training" of "actor.training"."""
    return model_stage.split(".")[1]


@dataclass(frozen=True)
class StagePlan:
    """How one model-stage runs.

    `devices` lists dp * tp * pp device ids in rank order: replica, then pipeline stage, then tp rank.
    `micro_batch` is the most samples in one packed micro-batch of one replica.
    """

    dp: int
    layout: Layout
    devices: tuple[int, ...]
    micro_batch: int
    recompute: bool = False

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Per replica its devices in rank order."""
        size = self.layout.size
        return tuple(self.devices[i * size : (i + 1) * size] for i in range(self.dp))

    def to_record(self) -> dict[str, Any]:
        return {
            "dp": self.dp,
            "tp": self.layout.tp,
            "pp": self.layout.pp,
            "devices": list(self.devices),
            "micro_batch": self.micro_batch,
            "recompute": self.recompute,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> StagePlan:
        return cls(
            dp=record["dp"],
            layout=Layout(record["tp"], record["pp"]),
            devices=tuple(record["devices"]),
            micro_batch=record["micro_batch"],
            recompute=record["recompute"],
        )


@dataclass(frozen=True)
class Plan:
    """One StagePlan for every model-stage of the run, in the order of MODEL_STAGES."""

    entries: tuple[tuple[str, StagePlan], ...]

    @classmethod
    def of(cls, stages: Mapping[str, StagePlan]) -> Plan:
        return cls(tuple((name, stages[name]) for name in MODEL_STAGES if name in stages))

    def __getitem__(self, model_stage: str) -> StagePlan:
        for name, stage in self.entries:
            if name == model_stage:
                return stage
        raise KeyError(model_stage)

    def __contains__(self, model_stage: object) -> bool:
        return any(name == model_stage for name, _ in self.entries)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.entries)

    def items(self) -> tuple[tuple[str, StagePlan], ...]:
        return self.entries

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that the plan uses, ascending."""
        return tuple(sorted({device for _, stage in self.entries for device in stage.devices}))

    def with_stage(self, model_stage: str, **changes: Any) -> Plan:
        """Return the plan with some fields of one model-stage changed."""
        return Plan.of({name: replace(s, **changes) if name == model_stage else s for name, s in self.entries})

    def to_record(self) -> dict[str, Any]:
        """Return {model-stage: {dp, tp, pp, devices, micro_batch, recompute}}, as metrics and journal hold it."""
        return {name: stage.to_record() for name, stage in self.entries}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Plan:
        return cls.of({name: StagePlan.from_record(entry) for name, entry in record.items()})

    def describe(self) -> str:
        """Return one line for people, such as `actor.generation 2x1x1 on 0,1; ...` (dp x tp x pp)."""
        return "; ".join(
            f"{name} {s.dp}x{s.layout.tp}x{s.layout.pp} on {','.join(map(str, s.devices))}" for name, s in self.entries
        )


def places_of(record: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return what of a plan's record says where its state lies: all but micro-batches and recomputation."""
    return {name: tuple(entry.get(key) for key in ("dp", "tp", "pp", "devices")) for name, entry in record.items()}


def check_plan(
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    device_ids: Sequence[int],
    *,
    samples_per_step: int,
    minibatch_samples: int,
) -> None:
    """Raise ValueError naming the first thing that makes a plan illegal (memory is checked elsewhere).

    Args:
        specs: per model-stage of the run its model; exactly these must be planned.
        device_ids: the devices there are.
        samples_per_step: most replicas of generation and inference.
        minibatch_samples: samples of the smallest minibatch, most replicas of training.
    """
    for name in plan:
        if name not in specs:
            raise ValueError(f"plan names `{name}`, which this run has not; its model-stages are {', '.join(specs)}.")
    for name, spec in specs.items():
        if name not in plan:
            raise ValueError(f"plan leaves out `{name}`; name every model-stage of the run, or use `plan: auto`.")
        _check_stage(name, plan[name], spec, set(device_ids))
        training = stage_of(name) == "training"
        most, of_what = (minibatch_samples, "a minibatch") if training else (samples_per_step, "a step")
        if plan[name].dp > most:
            raise ValueError(
                f"plan.{name}: dp={plan[name].dp} is more than the {most} samples of {of_what}; choose dp <= {most}."
            )


def _check_stage(name: str, stage: StagePlan, spec: ModelSpec, device_ids: set[int]) -> None:
    try:
        check_layout(spec, stage.layout)
    except ValueError as error:
        raise ValueError(f"plan.{name}: {error}") from None
    if stage.dp < 1 or stage.micro_batch < 1:
        raise ValueError(f"plan.{name}: dp={stage.dp}, micro_batch={stage.micro_batch}; both must be at least 1.")
    need = stage.dp * stage.layout.size
    if len(stage.devices) != need:
        raise ValueError(
            f"plan.{name}: dp*tp*pp = {stage.dp}*{stage.layout.tp}*{stage.layout.pp} needs {need} devices, "
            f"but `devices` lists {len(stage.devices)}; list exactly {need} ids."
        )
    twice = sorted({d for d in stage.devices if stage.devices.count(d) > 1})
    if twice:
        raise ValueError(
            f"plan.{name}: device {twice[0]} is listed twice; each replica rank needs a device of its own."
        )
    unknown = sorted(set(stage.devices) - device_ids)
    if unknown:
        raise ValueError(
            f"plan.{name}: asks for device {unknown[0]}, but there are {len(device_ids)} devices "
            f"({_ranges(device_ids)}); use fewer devices or raise `cluster.devices`."
        )


def _ranges(ids: set[int]) -> str:
    ordered = sorted(ids)
    if ordered == list(range(ordered[0], ordered[-1] + 1)) and len(ordered) > 1:
        return f"{ordered[0]}..{ordered[-1]}"
    return ", ".join(map(str, ordered))
