"""Predicted peak memory of every device of a plan, by kind: checked before anything runs.

A device holds the resident bytes of all model-stages placed on it, and, phase after phase, what the one model-stage
that runs there needs on top. Its peak is the largest phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from nereus.cost.activations import (
    COMPUTE_BYTES,
    RankSizes,
    logits_bytes,
    rank_sizes,
    sampling_bytes,
    saved_bytes,
    working_bytes,
)
from nereus.layout import Layout, slices_of
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan, stage_of

Precision = Literal["float32", "bfloat16", "float64"]

# In the order in which messages and tables name them.
KINDS = (
    "parameters",
    "compute copy",
    "optimizer",
    "gradients",
    "activations",
    "logits",
    "KV cache",
    "packed weights",
    "workspace",
    "sync buckets",
)

# A plan is feasible when no device's predicted peak is above this share of its capacity.
USABLE_SHARE = 0.9
# Most bytes in one bucket of a weight sync; one is filled while the other travels.
SYNC_BUCKET_BYTES = 32 * 2**20
# Thread stacks, allocator slack, and the scratch space of kernels.
FIXED_WORKSPACE_BYTES = 24 * 2**20
# Most prompt tokens of one prefill pass, unless one prompt alone is longer.
PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Workload:
    """What a step is made of. Lengths are the largest allowed ones, so that an admitted plan never runs out.

    Example: 32 samples in 2 minibatches; 4 replicas get shares of 4 samples each of a minibatch.
    """

    samples_per_step: int
    minibatches: int
    prompt_tokens: int
    response_tokens: int

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def minibatch_samples(self) -> int:
        """Samples of the largest minibatch."""
        return -(-self.samples_per_step // self.minibatches)

    @property
    def smallest_minibatch_samples(self) -> int:
        return self.samples_per_step // self.minibatches

    def share(self, model_stage: str, dp: int) -> int:
        """Return the samples of the largest share of one replica: of a minibatch in training, else of the step."""
        samples = self.minibatch_samples if stage_of(model_stage) == "training" else self.samples_per_step
        return max(1, -(-samples // dp))


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


@dataclass(frozen=True)
class RankMemory:
    """What one rank of a model-stage needs, in bytes: always, and on top of it while it runs a phase."""

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]


@lru_cache(maxsize=4096)
def rank_parameters(spec: ModelSpec, layout: Layout, rank: int) -> int:
    """Return the number of parameters that a rank holds, replicated ones and a tied embedding included."""
    return sum(part.num_elements for part in slices_of(spec, layout, rank))


def master_bytes(precision: Precision) -> int:
    """Return the bytes of one master weight, gradient or optimizer moment."""
    return max(4, COMPUTE_BYTES[precision])


def sequences_in_flight(stage: StagePlan, workload: Workload) -> int:
    """Return the KV slots of one replica of `actor.generation`: its micro-batch, at most its share of the step."""
    return min(stage.micro_batch, workload.share("actor.generation", stage.dp))


@lru_cache(maxsize=65536)
def _estimate(
    model_stage: str,
    spec: ModelSpec,
    layout: Layout,
    rank: int,
    share: int,
    micro_batch: int,
    recompute: bool,
    workload: Workload,
    precision: Precision,
) -> RankMemory:
    work = _Work(rank_sizes(spec, layout, rank), spec, layout, share, micro_batch, recompute, workload, precision)
    parameters = rank_parameters(spec, layout, rank)
    frozen = {"parameters": parameters * COMPUTE_BYTES[precision]}
    if stage_of(model_stage) == "generation":
        return RankMemory(frozen, {"generation": _generation(work)})
    if stage_of(model_stage) == "inference":
        return RankMemory(frozen, {"inference": _inference(work)})
    master = master_bytes(precision)
    resident = {"parameters": parameters * master, "optimizer": 2 * parameters * master}
    if COMPUTE_BYTES[precision] < master:
        resident["compute copy"] = parameters * COMPUTE_BYTES[precision]
    training = _training(work) | {"gradients": parameters * master}
    # Old log-probs and values are forward passes of the training model-stages.
    return RankMemory(resident, {"inference": _inference(work), "training": training})


def estimate_rank(
    model_stage: str, stage: StagePlan, spec: ModelSpec, rank: int, workload: Workload, precision: Precision
) -> RankMemory:
    """Return what rank `rank` of any replica of a model-stage needs."""
    # The cache's key leaves out the devices: they may be thousands.
    share = workload.share(model_stage, stage.dp)
    return _estimate(
        model_stage, spec, stage.layout, rank, share, stage.micro_batch, stage.recompute, workload, precision
    )


@dataclass(frozen=True)
class _Work:
    """All that decides what a rank needs while it runs."""

    sizes: RankSizes
    spec: ModelSpec
    layout: Layout
    share: int
    micro_batch: int
    recompute: bool
    workload: Workload
    precision: Precision


def _generation(work: _Work) -> dict[str, int]:
    spec, sizes, workload = work.spec, work.sizes, work.workload
    slots = min(work.micro_batch, work.share)
    size = COMPUTE_BYTES[work.precision]
    cached = slots * workload.sequence_tokens * sizes.layers * 2 * sizes.kv_heads * spec.head_dim
    rows = max(min(slots * workload.prompt_tokens, PREFILL_TOKENS), workload.prompt_tokens, slots)
    return {
        "KV cache": cached * size,
        # Packed copies serve narrow batches; in float64 the plain weights do.
        "packed weights": sizes.matrix_elements * size if work.precision != "float64" else 0,
        "activations": working_bytes(sizes, spec, rows, work.precision),
        "logits": sampling_bytes(sizes, spec, slots, work.layout.tp, work.precision),
        "workspace": FIXED_WORKSPACE_BYTES,
    }


def _inference(work: _Work) -> dict[str, int]:
    samples, workload = work.micro_batch, work.workload
    return {
        "activations": working_bytes(work.sizes, work.spec, samples * workload.sequence_tokens, work.precision),
        "logits": logits_bytes(work.sizes, samples * workload.response_tokens, work.precision, training=False),
        "workspace": FIXED_WORKSPACE_BYTES,
    }


def _training(work: _Work) -> dict[str, int]:
    # One forward, one backward: pipeline stage s holds pp - s micro-batches, if there are so many.
    live = min((work.layout.pp - work.sizes.stage) * work.micro_batch, work.share)
    one = min(work.micro_batch, work.share)
    tokens = work.workload.sequence_tokens
    # A weight's gradient is made apart and then added to the buffer; two may wait for it at once.
    fresh = 2 * work.sizes.largest_tensor_elements * COMPUTE_BYTES[work.precision]
    return {
        "activations": saved_bytes(
            work.sizes,
            work.spec,
            live_tokens=live * tokens,
            one_tokens=one * tokens,
            recompute=work.recompute,
            precision=work.precision,
        ),
        "logits": logits_bytes(work.sizes, one * work.workload.response_tokens, work.precision, training=True),
        "workspace": FIXED_WORKSPACE_BYTES + fresh,
    }


class PlanMemory:
    """The residents and phases of one plan on every device; the functions below are made of it."""

    def __init__(
        self, plan: Plan, specs: Mapping[str, ModelSpec], workload: Workload, precision: Precision
    ) -> None:
        self.plan, self.specs, self.workload, self.precision = plan, specs, workload, precision
        self.ranks = {
            name: {device: index % stage.layout.size for index, device in enumerate(stage.devices)}
            for name, stage in plan.items()
        }
        self.residents: dict[int, dict[str, int]] = {device: dict.fromkeys(KINDS, 0) for device in plan.devices}
        for name, ranks in self.ranks.items():
            for device, rank in ranks.items():
                for kind, count in self.rank(name, rank).resident.items():
                    self.residents[device][kind] += count

    def rank(self, model_stage: str, rank: int) -> RankMemory:
        stage, spec = self.plan[model_stage], self.specs[model_stage]
        return estimate_rank(model_stage, stage, spec, rank, self.workload, self.precision)

    def peak(self, device: int) -> MemoryPeak:
        """Return the largest phase of a device."""
        resident = self.residents[device]
        phases = [("weight sync", self._weight_sync(device))]
        for name, ranks in self.ranks.items():
            if device in ranks:
                phases += [(f"{p} of {name}", kinds) for p, kinds in self.rank(name, ranks[device]).phases.items()]
        phase, most = max(phases, key=lambda item: sum(item[1].values()))
        kinds = {kind: resident[kind] + most.get(kind, 0) for kind in KINDS}
        return MemoryPeak(device, phase, {kind: count for kind, count in kinds.items() if count})

    def _weight_sync(self, device: int) -> dict[str, int]:
        """Return the buckets that a device fills or empties when the actor's new weights travel to its generation."""
        actors = [n for n in ("actor.training", "actor.generation") if device in self.ranks.get(n, {})]
        counts = [rank_parameters(self.specs[n], self.plan[n].layout, self.ranks[n][device]) for n in actors]
        bucket = min(SYNC_BUCKET_BYTES, max(counts, default=0) * COMPUTE_BYTES[self.precision])
        return {"sync buckets": 2 * bucket, "workspace": FIXED_WORKSPACE_BYTES}


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


def runs_within(
    room: tuple[int, ...],
    model_stage: str,
    stage: StagePlan,
    spec: ModelSpec,
    workload: Workload,
    precision: Precision,
) -> bool:
    """Return whether every rank's phases stay within its `room` in bytes."""
    return all(
        sum(kinds.values()) <= most
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
        if runs_within(room, name, replace(stage, micro_batch=middle), spec, workload, precision):
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
        f"plan needs {worst.total / unit:.2f} {name} on device {worst.device} in {worst.phase} ({kinds}), but 90% of its "
        f"{capacity / unit:.2f} {name} are {USABLE_SHARE * capacity / unit:.2f} {name}; use a smaller ppo.micro_batch, "
        "recompute, more tp or pp, or raise cluster.memory_per_device."
    )
