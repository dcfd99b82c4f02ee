"""What a plan is sought for: a job on a cluster, with what is believed of its speed and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.cluster import Cluster
from nereus.cost.efficiency import Efficiencies
from nereus.cost.memory import USABLE_SHARE
from nereus.cost.moves import staging_operations
from nereus.cost.options import Options
from nereus.cost.rank_memory import Workload
from nereus.cost.rates import Rates
from nereus.cost.step import JobSpec, estimate_operations, phases_of
from nereus.plan import MODEL_STAGES, stage_of
from nereus.planner.space import DeviceOrder

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Setting:
    """A job, the devices in their order, and how fast and how full they get.

    `workload` is what memory is predicted for; `memory_factor` is what predicted peaks are multiplied by.
    """

    job: JobSpec
    cluster: Cluster
    efficiencies: Efficiencies
    workload: Workload
    memory_factor: float = 1.0

    @classmethod
    def of(
        cls,
        job: JobSpec,
        cluster: Cluster,
        efficiencies: Efficiencies,
        memory_length: float | None = None,
        memory_factor: float = 1.0,
    ) -> Setting:
        """Return the setting in which responses of `memory_length` tokens must fit; None: the load's p95."""
        workload = job.load.memory_workload(memory_length, accelerator=cluster.kind.accelerator)
        return cls(job, cluster, efficiencies, workload, memory_factor)

    @property
    def usable_share(self) -> float:
        """Share of a device's memory that predicted peaks corrected by measured ones may reach."""
        return USABLE_SHARE

    @cached_property
    def order(self) -> DeviceOrder:
        return DeviceOrder.of(self.cluster, self.usable_share / self.memory_factor, self.efficiencies.device_factor)

    @property
    def names(self) -> tuple[str, ...]:
        """The job's model-stages, in the order in which they are given devices."""
        return tuple(name for name in MODEL_STAGES if name in self.job.specs)

    def names_of(self, stage: str) -> tuple[str, ...]:
        """Return the model-stages of a stage, in the same order."""
        return tuple(name for name in self.names if stage_of(name) == stage)

    def seconds(self, name: str, options: Options, slowdown: Floats | float) -> dict[str, Floats]:
        """Return the seconds of a model-stage by phase, one for each option."""
        return {phase: self.phase_seconds(name, phase, options, slowdown) for phase in phases_of(name)}

    def phase_seconds(self, name: str, phase: str, options: Options, slowdown: Floats | float) -> Floats:
        operations = estimate_operations(name, phase, options, self.job, self.cluster.kind)
        return operations.total_s(self.efficiencies, slowdown)

    @cached_property
    def staging_s(self) -> Floats:
        """Seconds that writing a step's state takes, by the number of nodes that write; 0 with index 0, or if off."""
        trained = {name: self.job.specs[name] for name in self.names_of("training")}
        result = np.zeros(self.order.node[-1] + 2)
        if not self.job.staging or not trained:
            return result
        one_each = np.array(self.order.ids)[np.unique(self.order.node, return_index=True)[1]].tolist()
        one = staging_operations(
            trained, tuple(one_each[:1]), self.cluster, Rates(self.cluster.kind, self.job.precision)
        )
        fixed = float(one.count["storage_write"]) * self.efficiencies.latency_s["storage_write"]
        nodes = np.arange(1, len(result))
        result[1:] = fixed + float(one.work_s["storage_write"]) / self.efficiencies.efficiency["storage_write"] / nodes
        return result
