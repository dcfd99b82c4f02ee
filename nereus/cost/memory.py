"""Predicted peak memory of every device of a plan, by kind: checked before anything runs.

A device holds the resident bytes of all model-stages placed on it, and, phase after phase, what the one model-stage
that runs there needs on top. Its peak is the largest phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
def estimate_rank(
    model_stage: str, stage: StagePlan, spec: ModelSpec, rank: int, workload: Workload, precision: Precision
) -> RankMemory:
    """Return what rank `rank` of one replica of a model-stage needs."""
    sizes = rank_sizes(spec, stage.layout, rank)
    parameters = rank_parameters(spec, stage.layout, rank)
    if stage_of(model_stage) == "generation":
        phases = {"generation": _generation(sizes, spec, stage, workload, precision)}
        return RankMemory({"parameters": parameters * COMPUTE_BYTES[precision]}, phases)
    inference = _inference(sizes, spec, stage, workload, precision)
    if stage_of(model_stage) == "inference":
        return RankMemory({"parameters": parameters * COMPUTE_BYTES[precision]}, {"inference": inference})
    master = master_bytes(precision)
    resident = {"parameters": parameters * master, "optimizer": 2 * parameters * master}
    if COMPUTE_BYTES[precision] < master:
        resident["compute copy"] = parameters * COMPUTE_BYTES[precision]
    training = _training(sizes, spec, stage, workload, precision) | {"gradients": parameters * master}
    return RankMemory(resident, {"inference": inference, "training": training})


def _generation(
    sizes: RankSizes, spec: ModelSpec, stage: StagePlan, workload: Workload, precision: Precision
) -> dict[str, int]:
    slots = sequences_in_flight(stage, workload)
    size = COMPUTE_BYTES[precision]
    cached = slots * workload.sequence_tokens * sizes.layers * 2 * sizes.kv_heads * spec.head_dim
    rows = max(min(slots * workload.prompt_tokens, PREFILL_TOKENS), workload.prompt_tokens, slots)
    return {
        "KV cache": cached * size,
        # Packed copies serve narrow batches; in float64 and on other machines the plain weights do.
        "packed weights": sizes.matrix_elements * size if precision != "float64" else 0,
        "activations": working_bytes(sizes, spec, rows, precision),
        "logits": sampling_bytes(sizes, spec, slots, stage.layout.tp, precision),
        "workspace": FIXED_WORKSPACE_BYTES,
    }


def _inference(
    sizes: RankSizes, spec: ModelSpec, stage: StagePlan, workload: Workload, precision: Precision
) -> dict[str, int]:
    return {
        "activations": working_bytes(sizes, spec, stage.micro_batch * workload.sequence_tokens, precision),
        "logits": logits_bytes(sizes, stage.micro_batch * workload.response_tokens, precision, training=False),
        "workspace": FIXED_WORKSPACE_BYTES,
    }


def _training(
    sizes: RankSizes, spec: ModelSpec, stage: StagePlan, workload: Workload, precision: Precision
) -> dict[str, int]:
    share = workload.share("actor.training", stage.dp)
    # One forward, one backward: pipeline stage s holds pp - s micro-batches, if there are so many.
    live = min((stage.layout.pp - sizes.stage) * stage.micro_batch, share)
    one = min(stage.micro_batch, share)
    # A weight's gradient is made apart and then added to the buffer; two may wait for it at once.
    fresh = 2 * sizes.largest_tensor_elements * COMPUTE_BYTES[precision]
    return {
        "activations": saved_bytes(
            sizes,
            spec,
            live_tokens=live * workload.sequence_tokens,
            one_tokens=one * workload.sequence_tokens,
            recompute=stage.recompute,
            precision=precision,
        ),
        "logits": logits_bytes(sizes, one * workload.response_tokens, precision, training=True),
        "workspace": FIXED_WORKSPACE_BYTES + fresh,
    }


def _sync_bytes(plan: Plan, specs: Mapping[str, ModelSpec], device: int, precision: Precision) -> int:
    """Return the buckets a device fills or empties when the actor's new weights travel to its generation."""
    actors = [name for name in ("actor.training", "actor.generation") if name in plan and device in plan[name].devices]
    if not actors or plan["actor.training"].devices == plan["actor.generation"].devices[:1]:
        return 0
    most = max(rank_parameters(specs[n], plan[n].layout, _rank_on(plan[n], device)) for n in actors)
    return 2 * min(SYNC_BUCKET_BYTES, most * COMPUTE_BYTES[precision])


def _rank_on(stage: StagePlan, device: int) -> int:
    return stage.devices.index(device) % stage.layout.size


def _device_phases(
    plan: Plan, specs: Mapping[str, ModelSpec], workload: Workload, precision: Precision, device: int
) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield every phase of a device with its bytes by kind, the residents of all model-stages included."""
    here = {
        name: estimate_rank(name, stage, specs[name], _rank_on(stage, device), workload, precision)
        for name, stage in plan.items()
        if device in stage.devices
    }
    resident = dict.fromkeys(KINDS, 0)
    for memory in here.values():
        for kind, count in memory.resident.items():
            resident[kind] += count
    for name, memory in here.items():
        for phase, kinds in memory.phases.items():
            yield f"{phase} of {name}", {kind: resident[kind] + kinds.get(kind, 0) for kind in KINDS}
    sync = {"sync buckets": _sync_bytes(plan, specs, device, precision), "workspace": FIXED_WORKSPACE_BYTES}
    yield "weight sync", {kind: resident[kind] + sync.get(kind, 0) for kind in KINDS}


def estimate_device(
    plan: Plan, specs: Mapping[str, ModelSpec], workload: Workload, precision: Precision, device: int
) -> MemoryPeak:
    """Return the predicted peak of one device."""
    phases = _device_phases(plan, specs, workload, precision, device)
    phase, kinds = max(phases, key=lambda item: sum(item[1].values()))
    return MemoryPeak(device, phase, {kind: count for kind, count in kinds.items() if count})


def estimate_memory(
    plan: Plan, specs: Mapping[str, ModelSpec], workload: Workload, precision: Precision
) -> dict[int, MemoryPeak]:
    """Return the predicted peak of every device of a legal plan, by device id."""
    return {device: estimate_device(plan, specs, workload, precision, device) for device in plan.devices}


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
