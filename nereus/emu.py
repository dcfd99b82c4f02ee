"""Elastic Model Units: one replica of a model-stage with its layout and devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nereus.layout import Layout
from nereus.plan import Plan, StagePlan, role_of, stage_of


@dataclass(frozen=True, order=True)
class Emu:
    """One replica of a model-stage. `devices` are in rank order; nothing in it is sharded over DP."""

    model_stage: str
    replica: int
    layout: Layout
    devices: tuple[int, ...]

    @property
    def role(self) -> str:
        return role_of(self.model_stage)

    @property
    def stage(self) -> str:
        return stage_of(self.model_stage)

    @property
    def id(self) -> str:
        """Its name in logs and task runs, such as `actor.training/1`."""
        return f"{self.model_stage}/{self.replica}"

    def rank_of(self, device: int) -> int:
        return self.devices.index(device)


def emus_of(plan: Plan) -> tuple[Emu, ...]:
    """Return the units of a plan: per model-stage its replicas."""
    return tuple(
        Emu(name, index, stage.layout, devices)
        for name, stage in plan.items()
        for index, devices in enumerate(stage.replicas)
    )


def plan_of(emus: Iterable[Emu], like: Plan) -> Plan:
    """Return the plan whose units are `emus`; what moves no state (micro-batch, recomputation) comes from `like`."""
    grouped: dict[str, list[Emu]] = {}
    for emu in sorted(emus):
        grouped.setdefault(emu.model_stage, []).append(emu)
    stages = {}
    for name, units in grouped.items():
        devices = tuple(device for unit in units for device in unit.devices)
        old = like[name]
        stages[name] = StagePlan(len(units), units[0].layout, devices, old.micro_batch, old.recompute)
    return Plan.of(stages)
