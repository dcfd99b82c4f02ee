"""What one rank of a model-stage holds, by kind: all the time, and on top of it in each phase that it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, overload

import numpy as np
from numpy.typing import NDArray

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
from nereus.limits import PREFILL_TOKENS, STAGING_BUFFER_BYTES, gather_slots_bytes, reduce_slots_bytes
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
    "shared slots",
    "sync buckets",
    "staging buffers",
)

# Communicators, compiled kernels and their scratch space, less what the heap that a worker is born with has free.
# Measured on tiny models, of which nothing else is large.
FIXED_WORKSPACE_BYTES = 3 * 2**20
# Assumed, until a run measures it: on an accelerator the driver's context, NCCL's buffers and cuBLAS's workspaces ...
ACCELERATOR_WORKSPACE_BYTES = 2 * 2**30
# ... and the caching allocator with expandable segments, which wastes little.
ACCELERATOR_FRAGMENTATION = 0.1
# ... and a weight sync that takes up no more peers than this at once.
ACCELERATOR_SYNC_PEERS = 32
# glibc keeps tensors below 32 MiB on a heap with holes. Measured over steps of tiny models on 50 plans, the peak is 1.2
# to 1.4 times what is live where activations are most of it; over four passes of 8 layers at hidden 512 it is 1.44 to
# 1.5 times (float32; bfloat16 up to 1.6). What goes beyond is for the correction by measured peaks, and the headroom.
FRAGMENTATION = 0.35


@dataclass(frozen=True)
class Workload:
    """What a step is made of. Lengths are the largest that must fit.

    Where the samples are in hand, `mean_response_tokens` and `response_deviation` say how long all of them are: a
    micro-batch then holds less than as many of the longest. `accelerator` says that devices have memory of their own
    with a caching allocator, and compute on weights as they are; else they are slots of a CPU.

    Example: 32 samples in 2 minibatches; each of 4 replicas gets 4 samples of a minibatch.
    """

    samples_per_step: int
    minibatches: int
    prompt_tokens: int
    response_tokens: int
    staging_buffer_bytes: int = STAGING_BUFFER_BYTES  # of a worker that writes staged state
    accelerator: bool = False
    slot_tokens: int | None = None  # that a slot of the KV cache holds; None: as many as a sequence has
    mean_response_tokens: int | None = None
    response_deviation: int = 0  # standard deviation, in tokens

    @property
    def sequence_tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens

    @property
    def cached_tokens(self) -> int:
        """Tokens of a slot of the KV cache, which is made before the lengths are known."""
        return self.sequence_tokens if self.slot_tokens is None else self.slot_tokens

    @overload
    def rows_of(self, samples: int) -> int: ...
    @overload
    def rows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def rows_of(self, samples: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return the response tokens of the fullest micro-batch of so many samples.

        Minibatches are drawn at random, and the micro-batches of one are balanced: one standard deviation of the sum
        above the mean, and no less than the longest response needs among others of mean length.
        """
        most = samples * self.response_tokens
        if self.mean_response_tokens is None:
            return most
        above = np.maximum(self.response_tokens - self.mean_response_tokens, self.response_deviation * np.sqrt(samples))
        rows = np.minimum(most, samples * self.mean_response_tokens + np.ceil(above))
        return int(rows) if isinstance(samples, int) else rows.astype(np.int64)

    @overload
    def tokens_of(self, samples: int) -> int: ...
    @overload
    def tokens_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def tokens_of(self, samples: int | NDArray[np.int64]) -> int | NDArray[np.int64]:
        """Return the tokens of the fullest micro-batch of so many samples, prompts included."""
        return samples * self.prompt_tokens + self.rows_of(samples)

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
    work = _Work(spec, stage.layout, rank, share, stage.dp, stage.micro_batch, stage.recompute, workload, precision)
    return _estimate(model_stage, work)


@dataclass(frozen=True)
class _Work:
    """All that decides what a rank needs."""

    spec: ModelSpec
    layout: Layout
    rank: int
    share: int
    dp: int
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
            "shared slots": max(_tp_slots(work, prefill), _gather_slots(work, slots)),
        },
        workload,
    )


def _packs_weights(work: _Work) -> bool:
    """Return whether decoding has copies of the weights in the order that a CPU reads fastest; float64 has none."""
    return not work.workload.accelerator and work.precision != "float64"


def _tp_slots(work: _Work, tokens: int) -> int:
    """Return the bytes of shared memory in which the hidden states of a micro-batch are summed over tp ranks."""
    if work.workload.accelerator:
        return 0
    return reduce_slots_bytes(work.layout.tp, tokens * work.spec.hidden * work.element_bytes)


def _gather_slots(work: _Work, rows: int) -> int:
    """Return the bytes of shared memory in which the logits of a decoding pass are gathered from tp ranks."""
    if work.workload.accelerator:
        return 0
    return gather_slots_bytes(work.layout.tp, rows * work.sizes.vocab * work.element_bytes)


def _dp_slots(work: _Work) -> int:
    """Return the bytes of shared memory in which gradients are summed over replicas."""
    if work.workload.accelerator:
        return 0
    parameters = rank_parameters(work.spec, work.layout, work.rank)
    return reduce_slots_bytes(work.dp, parameters * lifted_bytes(work.precision))


def _inference(work: _Work) -> dict[str, int]:
    sizes, workload = work.sizes, work.workload
    samples = min(work.micro_batch, workload.samples_per_step)
    tokens, rows = workload.tokens_of(samples), workload.rows_of(samples)
    selected = rows * work.spec.hidden * work.element_bytes if sizes.is_last else 0
    activations = forward_bytes(sizes, tokens, workload.sequence_tokens, work.precision)
    logits = head_bytes(sizes, rows, work.precision)
    kinds = {"activations": activations + selected, "logits": logits, "shared slots": _tp_slots(work, tokens)}
    return _with_margins(kinds, workload)


def _training(work: _Work) -> dict[str, int]:
    # One forward, one backward: pipeline stage s holds pp - s micro-batches, if there are so many.
    sizes = work.sizes
    workload, one = work.workload, min(work.micro_batch, work.share)
    moments = training_moments(
        sizes,
        live_tokens=workload.tokens_of(min((work.layout.pp - sizes.stage) * work.micro_batch, work.share)),
        tokens=workload.tokens_of(one),
        rows=workload.rows_of(one),
        sequence_tokens=workload.sequence_tokens,
        recompute=work.recompute,
        precision=work.precision,
    )
    slots = _tp_slots(work, workload.tokens_of(one)) + _dp_slots(work)
    return max(
        (_with_margins({**moment, "shared slots": slots}, workload) for moment in moments),
        key=lambda kinds: sum(kinds.values()),
    )
