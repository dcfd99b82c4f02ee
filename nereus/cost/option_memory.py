"""Peak memory of many options of one model-stage at once: what its worst rank holds always, and at its peak."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.cost.activations import COMPUTE_BYTES, RankSizes, lifted_bytes, rank_sizes
from nereus.cost.option_activations import (
    Bytes,
    Ranks,
    decoding_bytes,
    forward_bytes,
    head_bytes,
    sampling_bytes,
    training_bytes,
)
from nereus.cost.rank_memory import FRAGMENTATION, Precision, Workload, rank_parameters
from nereus.layout import Layout
from nereus.limits import PREFILL_TOKENS
from nereus.model.spec import ModelSpec
from nereus.plan import stage_of


@dataclass(frozen=True)
class OptionMemory:
    """Bytes of the worst rank for each option: `resident` always; `peak` with its hungriest phase.

    The peak of a device is at most the largest of (peak of one model-stage + residents of the others on it), the
    buffers of a weight sync aside, which depend on two model-stages.
    """

    resident: Bytes
    peak: Bytes


def estimate_option_memory(
    model_stage: str,
    spec: ModelSpec,
    workload: Workload,
    precision: Precision,
    dp: ArrayLike,
    tp: ArrayLike,
    pp: ArrayLike,
    micro_batch: ArrayLike,
    recompute: ArrayLike = False,
) -> OptionMemory:
    """Return the memory of options; the arguments broadcast to one shape [n].

    The first pipeline stage holds most layers and activations in flight, the last one the head, and tp rank 0 the
    most of each: the worst rank is one of these two. The same bytes as `rank_memory` counts for them.
    """
    arrays = (np.atleast_1d(np.asarray(array)) for array in (dp, tp, pp, micro_batch, recompute))
    dp_, tp_, pp_, micro_batch_, recompute_ = np.broadcast_arrays(*arrays)
    samples = workload.minibatch_samples if stage_of(model_stage) == "training" else workload.samples_per_step
    share = np.maximum(1, -(-samples // dp_.astype(np.int64)))
    options = _Options(share, micro_batch_.astype(np.int64), recompute_.astype(bool), workload, precision)
    needs = [_estimate(model_stage, _gather_ranks(spec, tp_, pp_, last), options) for last in (False, True)]
    return OptionMemory(*(np.maximum(first, last) for first, last in zip(*needs, strict=True)))


@dataclass(frozen=True)
class _Options:
    """What is asked of a rank: samples of its replica's share, micro-batch and recomputation, arrays [n]."""

    share: Bytes
    micro_batch: Bytes
    recompute: NDArray[np.bool_]
    workload: Workload
    precision: Precision


def _gather_ranks(spec: ModelSpec, tp: ArrayLike, pp: ArrayLike, last: bool) -> Ranks:
    """Return tp rank 0 of the first or last pipeline stage of each option."""
    keys, index = np.unique(np.asarray(tp, np.int64) << 32 | np.asarray(pp, np.int64), return_inverse=True)
    sizes, parameters = [], []
    for key in keys.tolist():
        tp_, pp_ = key >> 32, key & 0xFFFFFFFF
        layout = Layout(tp_, pp_)
        rank = (pp_ - 1) * tp_ if last else 0
        sizes.append(rank_sizes(spec, layout, rank))
        parameters.append(rank_parameters(spec, layout, rank))

    def each(get: Callable[[RankSizes], int]) -> Bytes:
        return np.array([get(one) for one in sizes], np.int64)[index]

    return Ranks(
        spec=spec,
        pp=each(lambda one: one.layout.pp),
        tp=each(lambda one: one.layout.tp),
        stage=each(lambda one: one.stage),
        layers=each(lambda one: one.layers),
        heads=each(lambda one: one.heads),
        kv_heads=each(lambda one: one.kv_heads),
        intermediate=each(lambda one: one.intermediate),
        vocab=each(lambda one: one.vocab),
        is_last=each(lambda one: one.is_last).astype(bool),
        matrix_elements=each(lambda one: one.matrix_elements),
        parameters=np.array(parameters, np.int64)[index],
    )


def _estimate(model_stage: str, ranks: Ranks, options: _Options) -> tuple[Bytes, Bytes]:
    size = COMPUTE_BYTES[options.precision]
    if stage_of(model_stage) == "generation":
        packed = 0 if options.workload.accelerator or options.precision == "float64" else ranks.matrix_elements * size
        held = ranks.parameters * size + np.floor(FRAGMENTATION * packed).astype(np.int64)
        return held, held + _generation(ranks, options) + packed
    if stage_of(model_stage) == "inference":
        held = ranks.parameters * size
        return held, held + _inference(ranks, options)
    master = lifted_bytes(options.precision)
    copy = size if size < master else 0
    held = ranks.parameters * (3 * master + copy) + options.workload.staging_buffer_bytes
    training = _training(ranks, options) + ranks.parameters * master
    return held, held + np.maximum(_inference(ranks, options), training)


def _with_margins(activations: Bytes, others: Bytes, workload: Workload) -> Bytes:
    wasted = np.floor(workload.fragmentation * activations).astype(np.int64)
    return activations + wasted + others + workload.workspace_bytes


def _generation(ranks: Ranks, options: _Options) -> Bytes:
    workload, precision = options.workload, options.precision
    slots = np.minimum(options.micro_batch, options.share)
    cached = slots * workload.cached_tokens * ranks.layers * 2 * ranks.kv_heads * ranks.spec.head_dim
    prefill = np.maximum(np.minimum(slots * workload.prompt_tokens, PREFILL_TOKENS), workload.prompt_tokens)
    activations = np.maximum(
        forward_bytes(ranks, prefill, workload.prompt_tokens, precision),
        decoding_bytes(ranks, slots, workload.cached_tokens, precision),
    )
    others = cached * COMPUTE_BYTES[precision] + sampling_bytes(ranks, slots, precision)
    return _with_margins(activations, others, workload)


def _inference(ranks: Ranks, options: _Options) -> Bytes:
    workload, precision = options.workload, options.precision
    samples = np.minimum(options.micro_batch, workload.samples_per_step)
    rows = samples * workload.response_tokens
    selected = np.where(ranks.is_last, rows * ranks.spec.hidden * COMPUTE_BYTES[precision], 0)
    tokens = samples * workload.sequence_tokens
    activations = forward_bytes(ranks, tokens, workload.sequence_tokens, precision) + selected
    return _with_margins(activations, head_bytes(ranks, rows, precision), workload)


def _training(ranks: Ranks, options: _Options) -> Bytes:
    workload = options.workload
    moments = training_bytes(
        ranks,
        live_samples=np.minimum((ranks.pp - ranks.stage) * options.micro_batch, options.share),
        one_samples=np.minimum(options.micro_batch, options.share),
        sequence_tokens=workload.sequence_tokens,
        response_tokens=workload.response_tokens,
        recompute=options.recompute,
        precision=options.precision,
    )
    return np.maximum(*(_with_margins(activations, others, workload) for activations, others in moments))
