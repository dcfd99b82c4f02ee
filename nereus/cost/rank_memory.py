"""What one rank of a model-stage holds, by kind: all the time, and on top of it in each phase that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from nereus.cost.activations import (
    COMPUTE_BYTES,
    RankSizes,
    decoding_bytes,
    forward_bytes,
    head_bytes,
    lifted_bytes,
    rank_sizes,
    sampling_bytes,
    training_moments,
)
from nereus.layout import Layout, slices_of
from nereus.limits import PREFILL_TOKENS, STAGING_BUFFER_BYTES
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan, stage_of

Precision = Literal["float32", "bfloat16", "float64"]

# In the order in which tables name them.
KINDS = (
    "parameters",
    "compute copy",
    "optimizer",
    "gradients",
    "activations",
    "fragmentation",
    "logits",
    "KV cache",
    "packed weights",
    "workspace",
    "sync buckets",
    "staging buffers",
)

# Thread stacks, communicators, loaded kernels and their scratch space. Measured in the first step of a tiny model.
FIXED_WORKSPACE_BYTES = 64 * 2**20
# Assumed, until a run measures it: on an accelerator the driver's context, NCCL's buffers and cuBLAS's workspaces ...
ACCELERATOR_WORKSPACE_BYTES = 2 * 2**30
# ... and the caching allocator with expandable segments, which wastes little.
ACCELERATOR_FRAGMENTATION = 0.1
# ... and a weight sync that takes up no more peers than this at once.
ACCELERATOR_SYNC_PEERS = 32
# glibc keeps tensors below 32 MiB on a heap with holes. Measured over four passes of 8 layers at hidden 512, the peak
# is 1.44 to 1.5 times what is live (float32; bfloat16 up to 1.6), the first time 1.15 to 1.4 times.
FRAGMENTATION = 0.5


@dataclass(frozen=True)
class Workload:
    """What a step is made of. Lengths are the largest that must fit.

    `accelerator` says that devices have memory of their own with a caching allocator, and compute on weights as they
    are; else they are slots of a CPU.

    Example: 32 samples in 2 minibatches; each of 4 replicas gets 4 samples of a minibatch.
    """

    samples_per_step: int
    minibatches: int
    prompt_tokens: int
    response_tokens: int
    staging_buffer_bytes: int = STAGING_BUFFER_BYTES  # of a worker that writes staged state
    accelerator: bool = False
    slot_tokens: int | None = None  # that a slot of the KV cache holds; None: as many as a sequence has

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of a slot of the KV cache, which is made before the lengths are known."""
        return self.sequence_tokens if self.slot_tokens is None else self.slot_tokens

    @property
    def minibatch_samples(self) -> int:
        """Samples of the largest minibatch."""
        return -(-self.samples_per_step // self.minibatches)

    @property
    def smallest_minibatch_samples(self) -> int:
        return self.samples_per_step // self.minibatches

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a device needs to work at all."""
        return ACCELERATOR_WORKSPACE_BYTES if self.accelerator else FIXED_WORKSPACE_BYTES

    @property
    def fragmentation(self) -> float:
        """Bytes that the allocator wastes for each byte of activations."""
        return ACCELERATOR_FRAGMENTATION if self.accelerator else FRAGMENTATION

    @property
    def most_sync_peers(self) -> int | None:
        """Devices that a device has messages of a weight sync under way with, at most; None: all there are."""
        return ACCELERATOR_SYNC_PEERS if self.accelerator else None

    def share(self, model_stage: str, dp: int) -> int:
        """Return the samples of the largest share of one replica: of a minibatch in training, else of the step."""
        samples = self.minibatch_samples if stage_of(model_stage) == "training" else self.samples_per_step
        return max(1, -(-samples // dp))


@dataclass(frozen=True)
class RankMemory:
    """Bytes by kind: `resident` always, `phases` ("generation", "inference", "training") on top while they run."""

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]


@lru_cache(maxsize=4096)
def rank_parameters(spec: ModelSpec, layout: Layout, rank: int) -> int:
    """Return the number of parameters that a rank holds, replicated ones and a tied embedding included."""
    return sum(part.num_elements for part in slices_of(spec, layout, rank))


def estimate_rank(
    model_stage: str, stage: StagePlan, spec: ModelSpec, rank: int, workload: Workload, precision: Precision
) -> RankMemory:
    """Return what rank `rank` of the replica with the largest share needs."""
    # The cache's key leaves out the devices: they may be thousands.
    share = workload.share(model_stage, stage.dp)
    work = _Work(spec, stage.layout, rank, share, stage.micro_batch, stage.recompute, workload, precision)
    return _estimate(model_stage, work)


@dataclass(frozen=True)
class _Work:
    """All that decides what a rank needs."""

    spec: ModelSpec
    layout: Layout
    rank: int
    share: int
    micro_batch: int
    recompute: bool
    workload: Workload
    precision: Precision

    @property
    def sizes(self) -> RankSizes:
        return rank_sizes(self.spec, self.layout, self.rank)

    @property
    def element_bytes(self) -> int:
        return COMPUTE_BYTES[self.precision]


@lru_cache(maxsize=65536)
def _estimate(model_stage: str, work: _Work) -> RankMemory:
    parameters = rank_parameters(work.spec, work.layout, work.rank)
    frozen = {"parameters": parameters * work.element_bytes}
    if stage_of(model_stage) == "generation":
        generation = _generation(work)
        # Packed weights are freed after generation, but the heap keeps much of their place.
        frozen["fragmentation"] = int(FRAGMENTATION * generation["packed weights"])
        return RankMemory(frozen, {"generation": generation})
    if stage_of(model_stage) == "inference":
        return RankMemory(frozen, {"inference": _inference(work)})
    master = lifted_bytes(work.precision)
    resident = {"parameters": parameters * master, "optimizer": 2 * parameters * master}
    if work.element_bytes < master:
        resident["compute copy"] = parameters * work.element_bytes
    training = {**_training(work), "gradients": parameters * master}
    # Old log-probs and values are forward passes of the training model-stages.
    return RankMemory(resident, {"inference": _inference(work), "training": training})


def _with_margins(kinds: dict[str, int], workload: Workload) -> dict[str, int]:
    kinds["fragmentation"] = int(workload.fragmentation * kinds["activations"])
    kinds["workspace"] = kinds.get("workspace", 0) + workload.workspace_bytes
    return kinds


def _generation(work: _Work) -> dict[str, int]:
    sizes, workload = work.sizes, work.workload
    slots = min(work.micro_batch, work.share)
    cached = slots * workload.cached_tokens * sizes.layers * 2 * sizes.kv_heads * work.spec.head_dim
    prefill = max(min(slots * workload.prompt_tokens, PREFILL_TOKENS), workload.prompt_tokens)
    activations = max(
        forward_bytes(sizes, prefill, workload.prompt_tokens, work.precision),
        decoding_bytes(sizes, slots, workload.cached_tokens, work.precision),
    )
    return _with_margins(
        {
            "KV cache": cached * work.element_bytes,
            "packed weights": sizes.matrix_elements * work.element_bytes if _packs_weights(work) else 0,
            "activations": activations,
            "logits": sampling_bytes(sizes, slots, work.precision),
        },
        workload,
    )


def _packs_weights(work: _Work) -> bool:
    """Return whether decoding has copies of the weights in the order that a CPU reads fastest; float64 has none."""
    return not work.workload.accelerator and work.precision != "float64"


def _inference(work: _Work) -> dict[str, int]:
    sizes, workload = work.sizes, work.workload
    samples = min(work.micro_batch, workload.samples_per_step)
    tokens = samples * workload.sequence_tokens
    rows = samples * workload.response_tokens
    selected = rows * work.spec.hidden * work.element_bytes if sizes.is_last else 0
    activations = forward_bytes(sizes, tokens, workload.sequence_tokens, work.precision)
    logits = head_bytes(sizes, rows, work.precision)
    return _with_margins({"activations": activations + selected, "logits": logits}, workload)


def _training(work: _Work) -> dict[str, int]:
    # One forward, one backward: pipeline stage s holds pp - s micro-batches, if there are so many.
    sizes = work.sizes
    moments = training_moments(
        sizes,
        live_samples=min((work.layout.pp - sizes.stage) * work.micro_batch, work.share),
        one_samples=min(work.micro_batch, work.share),
        sequence_tokens=work.workload.sequence_tokens,
        response_tokens=work.workload.response_tokens,
        recompute=work.recompute,
        precision=work.precision,
    )
    return max((_with_margins(moment, work.workload) for moment in moments), key=lambda kinds: sum(kinds.values()))
