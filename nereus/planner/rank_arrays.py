"""Memory by rank for many options at once: every kind of rank of every layout, and what each needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.cost.activations import COMPUTE_BYTES, RankSizes, lifted_bytes, rank_sizes
from nereus.cost.option_activations import (
    Ranks,
    decoding_bytes,
    forward_bytes,
    gather_slots_bytes,
    head_bytes,
    reduce_slots_bytes,
    sampling_bytes,
    training_bytes,
)
from nereus.cost.rank_memory import FRAGMENTATION, Precision, Workload, rank_parameters
from nereus.layout import Layout, partition
from nereus.limits import PREFILL_TOKENS
from nereus.model.spec import ModelSpec

Ints = NDArray[np.int64]

_FIELDS = (
    *("tp", "pp", "stage", "layers", "heads", "kv_heads", "intermediate", "vocab"),
    *("is_last", "matrix_elements", "parameters"),
)


def take_ranks(ranks: Ranks, index: ArrayLike) -> Ranks:
    """Return the ranks of an array of indices, in its shape."""
    return replace(ranks, **{name: getattr(ranks, name)[index] for name in _FIELDS})


@dataclass(frozen=True)
class RankTypes:
    """The ranks of several layouts of one model, each kind once.

    `ranks` has one element a kind; `of_rank[i]` maps the ranks of layout i to kinds; `first[i]` is that of rank 0.
    """

    layouts: tuple[Layout, ...]
    ranks: Ranks
    of_rank: tuple[Ints, ...]
    first: Ints


@lru_cache(maxsize=1024)
def rank_types(spec: ModelSpec, layouts: tuple[Layout, ...]) -> RankTypes:
    """Return the kinds of ranks of some layouts: tp ranks of one stage differ only where a split is uneven."""
    rows: list[tuple[int, ...]] = []
    of_rank = []
    for layout in layouts:
        keys = list(_keys(spec, layout))
        kinds = {key: len(rows) + i for i, key in enumerate(dict.fromkeys(keys))}
        of_rank.append(np.array([kinds[key] for key in keys], dtype=np.int64))
        rows += [_row(spec, layout, keys.index(key)) for key in kinds]
    columns = dict(zip(_FIELDS, np.array(rows, dtype=np.int64).T, strict=True))
    columns["is_last"] = columns["is_last"].astype(bool)
    return RankTypes(layouts, Ranks(spec, **columns), tuple(of_rank), np.array([kinds[0] for kinds in of_rank]))


def _keys(spec: ModelSpec, layout: Layout) -> Iterator[tuple[int, ...]]:
    """Yield for each rank what tells its kind apart: its stage, and the sizes of its shares of what tp splits."""
    split = [partition(units, layout.tp) for units in (spec.kv_heads, spec.intermediate, spec.vocab)]
    shares = [tuple(part[t][1] - part[t][0] for part in split) for t in range(layout.tp)]
    for rank in range(layout.size):
        yield (layout.stage(rank), *shares[layout.tp_rank(rank)])


def _row(spec: ModelSpec, layout: Layout, rank: int) -> tuple[int, ...]:
    sizes, parameters = _sizes_of_like(spec, layout, rank)
    of_sizes = (sizes.layers, sizes.heads, sizes.kv_heads, sizes.intermediate, sizes.vocab, int(sizes.is_last))
    return (layout.tp, layout.pp, layout.stage(rank), *of_sizes, sizes.matrix_elements, parameters)


def _sizes_of_like(spec: ModelSpec, layout: Layout, rank: int) -> tuple[RankSizes, int]:
    """Return sizes and parameters of a rank, looked up at the first stage in the middle that has as many layers."""
    stage, last = layout.stage(rank), layout.pp - 1
    if 0 < stage < last:
        bounds = partition(spec.layers, layout.pp)
        layers = bounds[stage][1] - bounds[stage][0]
        alike = next(s for s in range(1, last) if bounds[s][1] - bounds[s][0] == layers)
        rank = alike * layout.tp + layout.tp_rank(rank)
    return rank_sizes(spec, layout, rank), rank_parameters(spec, layout, rank)


@dataclass(frozen=True)
class MemoryFormulas:
    """Bytes of ranks under one workload; all arguments and results broadcast. `stage` is that of the model-stage.

    Source: `nereus.cost.rank_memory`, which says the same of one rank and one option.
    """

    workload: Workload
    precision: Precision

    def resident(self, stage: str, ranks: Ranks) -> Ints:
        """Return the bytes that ranks hold always, but for staging buffers, which a device has once."""
        size, master = COMPUTE_BYTES[self.precision], lifted_bytes(self.precision)
        if stage == "training":
            return ranks.parameters * (3 * master + (size if size < master else 0))
        held = ranks.parameters * size
        return held + np.floor(FRAGMENTATION * self._packed(ranks)).astype(np.int64) if stage == "generation" else held

    def phase(
        self,
        stage: str,
        ranks: Ranks,
        share: ArrayLike,
        micro_batch: ArrayLike,
        recompute: ArrayLike = False,
        dp: ArrayLike = 1,
    ) -> Ints:
        """Return the bytes of the hungriest phase on top: generation, inference, or inference and training."""
        share, micro_batch = np.asarray(share), np.asarray(micro_batch)
        if stage == "generation":
            return self._generation(ranks, np.minimum(micro_batch, share))
        inference = self._inference(ranks, micro_batch)
        if stage == "inference":
            return inference
        return np.maximum(inference, self._training(ranks, share, micro_batch, np.asarray(recompute), np.asarray(dp)))

    def _packed(self, ranks: Ranks) -> Ints:
        packs = not self.workload.accelerator and self.precision != "float64"
        return ranks.matrix_elements * (COMPUTE_BYTES[self.precision] if packs else 0)

    def _with_margins(self, activations: Ints, others: Ints) -> Ints:
        wasted = np.floor(self.workload.fragmentation * activations).astype(np.int64)
        return activations + wasted + others + self.workload.workspace_bytes

    def _generation(self, ranks: Ranks, slots: Ints) -> Ints:
        work, precision = self.workload, self.precision
        cached = slots * work.cached_tokens * ranks.layers * 2 * ranks.kv_heads * ranks.spec.head_dim
        prefill = np.maximum(np.minimum(slots * work.prompt_tokens, PREFILL_TOKENS), work.prompt_tokens)
        activations = np.maximum(
            forward_bytes(ranks, prefill, work.prompt_tokens, precision),
            decoding_bytes(ranks, slots, work.cached_tokens, precision),
        )
        others = cached * COMPUTE_BYTES[precision] + self._packed(ranks) + sampling_bytes(ranks, slots, precision)
        return self._with_margins(
            activations, others + np.maximum(self._tp_slots(ranks, prefill), self._gather_slots(ranks, slots))
        )

    def _tp_slots(self, ranks: Ranks, tokens: Ints) -> Ints:
        if self.workload.accelerator:
            return np.zeros_like(tokens)
        return reduce_slots_bytes(ranks.tp, tokens * ranks.spec.hidden * COMPUTE_BYTES[self.precision])

    def _gather_slots(self, ranks: Ranks, rows: Ints) -> Ints:
        if self.workload.accelerator:
            return np.zeros_like(rows)
        return gather_slots_bytes(ranks.tp, rows * ranks.vocab * COMPUTE_BYTES[self.precision])

    def _dp_slots(self, ranks: Ranks, dp: Ints) -> Ints:
        if self.workload.accelerator:
            return np.zeros_like(dp)
        return reduce_slots_bytes(dp, ranks.parameters * lifted_bytes(self.precision))

    def _inference(self, ranks: Ranks, micro_batch: Ints) -> Ints:
        work, precision = self.workload, self.precision
        samples = np.minimum(micro_batch, work.samples_per_step)
        tokens, rows = work.tokens_of(samples), work.rows_of(samples)
        selected = np.where(ranks.is_last, rows * ranks.spec.hidden * COMPUTE_BYTES[precision], 0)
        activations = forward_bytes(ranks, tokens, work.sequence_tokens, precision) + selected
        others = head_bytes(ranks, rows, precision) + self._tp_slots(ranks, tokens)
        return self._with_margins(activations, others)

    def _training(self, ranks: Ranks, share: Ints, micro_batch: Ints, recompute: NDArray[np.bool_], dp: Ints) -> Ints:
        work, one = self.workload, np.minimum(micro_batch, share)
        moments = training_bytes(
            ranks,
            live_tokens=work.tokens_of(np.minimum((ranks.pp - ranks.stage) * micro_batch, share)),
            tokens=work.tokens_of(one),
            rows=work.rows_of(one),
            sequence_tokens=work.sequence_tokens,
            recompute=recompute,
            precision=self.precision,
        )
        in_head, in_layer = (self._with_margins(*moment) for moment in moments)
        slots = self._tp_slots(ranks, work.tokens_of(one)) + self._dp_slots(ranks, dp)
        return np.maximum(in_head, in_layer) + slots + ranks.parameters * lifted_bytes(self.precision)
