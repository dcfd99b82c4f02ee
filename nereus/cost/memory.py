"""Predicted peak memory of every device of a plan, by kind: checked before anything runs.

A device holds the resident bytes of all model-stages placed on it, and, phase after phase, what the one model-stage
that runs there needs on top. Its peak is the largest phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from nereus.cost.activations import COMPUTE_BYTES
from nereus.cost.rank_memory import (
    KINDS,
    Precision,
    RankMemory,
    Workload,
    estimate_rank,
    rank_parameters,
)
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan, stage_of

__all__ = [
    "KINDS",
    "MemoryPeak",
    "PlanMemory",
    "Precision",
    "Workload",
    "check_memory",
    "estimate_memory",
    "fits",
    "kv_slots",
    "overflow_bytes",
    "room_by_rank",
    "spare_bytes",
]

# A plan is feasible when no device's predicted peak is above this share of its capacity.
USABLE_SHARE = 0.9
# Buffers of a weight sync for each pair of devices, each way: two of the rank's own and two of shared memory.
SYNC_BUCKETS_IN_FLIGHT = 4


@dataclass(frozen=True)
class MemoryPeak:
    """The largest phase of one device: its name, such as "training of actor.training", and bytes by kind."""

    device: int
    phase: str
    kinds: Mapping[str, int]

    @property
    def total(self) -> int:
        """Predicted bytes at the peak."""
        return sum(self.kinds.values())


class PlanMemory:
    """The residents and phases of one plan on every device; the functions below are made of it."""

    def __init__(self, plan: Plan, specs: Mapping[str, ModelSpec], workload: Workload, precision: Precision) -> None:
        self.plan, self.specs, self.workload, self.precision = plan, specs, workload, precision
        self.ranks = {
            name: {device: index % stage.layout.size for index, device in enumerate(stage.devices)}
            for name, stage in plan.items()
        }
        # Devices with the same rank of every model-stage need the same: on a large cluster they are few kinds.
        self._likes: dict[tuple[int, ...], int] = {}
        self._like = {
            device: self._likes.setdefault(tuple(ranks.get(device, -1) for ranks in self.ranks.values()), device)
            for device in plan.devices
        }
        of_kind = {device: self._resident(device) for device in self._likes.values()}
        self.residents: dict[int, dict[str, int]] = {d: of_kind[like] for d, like in self._like.items()}
        self._peaks: dict[int, MemoryPeak] = {}

    def _resident(self, device: int) -> dict[str, int]:
        kinds = dict.fromkeys(KINDS, 0)
        for name, ranks in self.ranks.items():
            if device in ranks:
                for kind, count in self.rank(name, ranks[device]).resident.items():
                    kinds[kind] += count
                if stage_of(name) == "training":
                    kinds["staging buffers"] = self.workload.staging_buffer_bytes
        return kinds

    def rank(self, model_stage: str, rank: int) -> RankMemory:
        stage, spec = self.plan[model_stage], self.specs[model_stage]
        return estimate_rank(model_stage, stage, spec, rank, self.workload, self.precision)

    def phases(self, device: int) -> dict[str, Mapping[str, int]]:
        """Return what each phase of a device needs on top of the residents, by the phase's name."""
        phases: dict[str, Mapping[str, int]] = {"weight sync": self._weight_sync(device)}
        for name, ranks in self.ranks.items():
            if device in ranks:
                needs = self.rank(name, ranks[device]).phases
                phases |= {f"{phase} of {name}": kinds for phase, kinds in needs.items()}
        return phases

    def peak(self, device: int) -> MemoryPeak:
        """Return the largest phase of a device, with the residents."""
        like = self._like[device]
        if like not in self._peaks:
            self._peaks[like] = self._peak(like)
        return replace(self._peaks[like], device=device)

    def _peak(self, device: int) -> MemoryPeak:
        phase, most = max(self.phases(device).items(), key=lambda item: sum(item[1].values()))
        kinds = {kind: self.residents[device][kind] + most.get(kind, 0) for kind in KINDS}
        return MemoryPeak(device, phase, {kind: count for kind, count in kinds.items() if count})

    def _weight_sync(self, device: int) -> dict[str, int]:
        """Return the messages that a device has under way when the actor's new weights travel to its generation."""
        source, target = self.ranks.get("actor.training", {}), self.ranks.get("actor.generation", {})
        fixed = {"workspace": self.workload.workspace_bytes}
        if not source or not target:
            return fixed
        held, wanted = (
            rank_parameters(self.specs[name], self.plan[name].layout, ranks[device]) if device in ranks else 0
            for name, ranks in (("actor.training", source), ("actor.generation", target))
        )
        if self._syncs_in_place():
            return fixed
        num_bytes = 0
        # A device sends to the others of generation and receives from the others of training.
        for elements, peers in ((held, target), (wanted, source)):
            message = min(elements * COMPUTE_BYTES[self.precision], SYNC_BUCKETS_IN_FLIGHT * SYNC_BUCKET_BYTES)
            others = len(peers) - (device in peers)
            num_bytes += message * min(others, self.workload.most_sync_peers or others)
        return {**fixed, "sync buckets": num_bytes} if num_bytes else fixed

    def _syncs_in_place(self) -> bool:
        """Return whether every rank of generation lies where the same rank of training does."""
        training, generation = self.plan["actor.training"], self.plan["actor.generation"]
        return training.layout == generation.layout and set(generation.replicas) <= set(training.replicas)


def estimate_memory(
    plan: Plan, specs: Mapping[str, ModelSpec], workload: Workload, precision: Precision
) -> dict[int, MemoryPeak]:
    """Return the predicted peak of every device of a legal plan, by device id."""
    memory = PlanMemory(plan, specs, workload, precision)
    return {device: memory.peak(device) for device in plan.devices}


def room_by_rank(
    model_stage: str,
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    workload: Workload,
    precision: Precision,
    capacities: Mapping[int, int],
) -> tuple[int, ...]:
    """Return per rank of a model-stage the bytes that it may use while it runs: the least over its replicas.

    That is 90% of the device less what is resident of all model-stages there; it may be negative. It depends on no
    micro-batch and no recomputation.
    """
    residents = PlanMemory(plan, specs, workload, precision).residents
    return tuple(
        min(int(USABLE_SHARE * capacities[device]) - sum(residents[device].values()) for device in devices)
        for devices in zip(*plan[model_stage].replicas, strict=True)
    )


def overflow_bytes(
    room: tuple[int, ...],
    model_stage: str,
    stage: StagePlan,
    spec: ModelSpec,
    workload: Workload,
    precision: Precision,
) -> int:
    """Return by how many bytes the hungriest phase of the worst rank goes beyond its `room`; at most 0 when all fit."""
    return max(
        sum(kinds.values()) - most
        for rank, most in enumerate(room)
        for kinds in estimate_rank(model_stage, stage, spec, rank, workload, precision).phases.values()
    )


def kv_slots(
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    workload: Workload,
    precision: Precision,
    capacities: Mapping[int, int],
) -> int:
    """Return the most sequences in flight of one replica of `actor.generation` that fit, up to its share of the step.

    Returns 0 when not even one fits.
    """
    name = "actor.generation"
    stage, spec = plan[name], specs[name]
    room = room_by_rank(name, plan, specs, workload, precision, capacities)
    low, high = 0, workload.share(name, stage.dp)
    while low < high:
        middle = (low + high + 1) // 2
        if overflow_bytes(room, name, replace(stage, micro_batch=middle), spec, workload, precision) <= 0:
            low = middle
        else:
            high = middle - 1
    return low


def fits(
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    workload: Workload,
    precision: Precision,
    capacities: Mapping[int, int],
) -> bool:
    """Return whether the predicted peak of every device is at most 90% of its capacity in bytes."""
    peaks = estimate_memory(plan, specs, workload, precision)
    return all(peak.total <= USABLE_SHARE * capacities[device] for device, peak in peaks.items())


def spare_bytes(
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    workload: Workload,
    precision: Precision,
    capacities: Mapping[int, int],
) -> dict[int, int]:
    """Return by device id the bytes between its predicted peak and 90% of its capacity: free in every phase."""
    peaks = estimate_memory(plan, specs, workload, precision)
    return {d: max(0, int(USABLE_SHARE * capacities[d]) - peak.total) for d, peak in peaks.items()}


def check_memory(
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    workload: Workload,
    precision: Precision,
    capacities: Mapping[int, int],
) -> dict[int, MemoryPeak]:
    """Return the predicted peaks of a plan that fits.

    Args:
        capacities: bytes of memory by device id.

    Raises:
        ValueError: a device would need more than 90% of its capacity; names the worst one and its bytes by kind.
    """
    peaks = estimate_memory(plan, specs, workload, precision)
    worst = max(peaks.values(), key=lambda peak: peak.total / capacities[peak.device])
    capacity = capacities[worst.device]
    if worst.total <= USABLE_SHARE * capacity:
        return peaks
    unit, name = (2**30, "GiB") if worst.total >= 2**29 else (2**20, "MiB")
    kinds = ", ".join(f"{kind} {count / unit:.2f}" for kind, count in sorted(worst.kinds.items(), key=lambda i: -i[1]))
    raise ValueError(
        f"plan needs {worst.total / unit:.2f} {name} on device {worst.device} in {worst.phase} ({kinds}), "
        f"but 90% of its {capacity / unit:.2f} {name} are {USABLE_SHARE * capacity / unit:.2f} {name}; "
        "use a smaller ppo.micro_batch, recompute, more tp or pp, or raise cluster.memory_per_device."
    )
