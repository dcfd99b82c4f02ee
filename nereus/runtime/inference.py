"""Forward passes over finished rollouts: log-probs, values and reward scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from nereus.model.decoder import DecoderShard
from nereus.model.heads import token_logprobs
from nereus.runtime.links import Links
from nereus.runtime.pipeline import run_forward
from nereus.runtime.samples import PackedSamples, Sample, pack_samples, pack_whole


@dataclass(frozen=True)
class InferenceWork:
    """One replica's share of a step's rollouts, cut into packed micro-batches of sample indices."""

    samples: tuple[Sample, ...]
    micro_batches: tuple[tuple[int, ...], ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.tokens) for sample in self.samples)

    def in_order(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return per-sample results in the order of `samples`, given them in micro-batch order."""
        results: list[np.ndarray] = [np.empty(0)] * len(self.samples)
        for index, piece in zip((i for batch in self.micro_batches for i in batch), pieces, strict=True):
            results[index] = piece
        return results


def _infer(
    shard: DecoderShard,
    links: Links,
    work: InferenceWork,
    pack: Callable[[list[Sample]], PackedSamples],
    head: Callable[[Tensor, PackedSamples], Tensor],
) -> list[np.ndarray]:
    """Run packed forward passes; `head` returns one number for each of a pack's `rows`, cut here by sample."""
    packed = [pack([work.samples[i] for i in batch]) for batch in work.micro_batches]
    pieces: list[np.ndarray] = []
    for output, pack_of in zip(run_forward(shard, links, packed, head), packed, strict=links.is_last):
        pieces += [piece.double().cpu().numpy() for piece in output.split(list(pack_of.rows_per_sample))]
    return work.in_order(pieces) if links.is_last else []


def _packer(shard: DecoderShard) -> Callable[[list[Sample]], PackedSamples]:
    return partial(pack_samples, dtype=shard.dtype, device=next(shard.parameters()).device)


@torch.no_grad()
def infer_logprobs(shard: DecoderShard, links: Links, work: InferenceWork, temperature: float) -> list[np.ndarray]:
    """Return per sample the log-probs [R] (float64 array) of its response tokens; [] off the last stage."""

    def head(hidden: Tensor, packed: PackedSamples) -> Tensor:
        rows = hidden.index_select(0, packed.rows)
        return token_logprobs(shard, rows, packed.targets, temperature=temperature)[0]

    return _infer(shard, links, work, _packer(shard), head)


@torch.no_grad()
def infer_values(shard: DecoderShard, links: Links, work: InferenceWork) -> list[np.ndarray]:
    """Return per sample the values [R] (float64 array) before each response token; [] off the last stage."""

    def head(hidden: Tensor, packed: PackedSamples) -> Tensor:
        return shard.values(hidden.index_select(0, packed.rows))

    return _infer(shard, links, work, _packer(shard), head)


@torch.no_grad()
def infer_scores(shard: DecoderShard, links: Links, work: InferenceWork) -> list[np.ndarray]:
    """Return per sample its reward score [1] (float64 array), read at its last token; [] off the last stage."""

    def head(hidden: Tensor, packed: PackedSamples) -> Tensor:
        return shard.scores(hidden.index_select(0, packed.rows))[:, 0]

    return _infer(shard, links, work, partial(pack_whole, device=next(shard.parameters()).device), head)
