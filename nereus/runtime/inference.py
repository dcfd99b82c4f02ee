"""Forward passes over finished rollouts: log-probs, values and reward scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    def in_order(self, pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return per-sample results in the order of `samples`, given them in micro-batch order."""
        results: list[np.ndarray] = [np.empty(0)] * len(self.samples)
        for index, piece in zip((i for batch in self.micro_batches for i in batch), pieces, strict=True):
            results[index] = piece
        return results


def _device(shard: DecoderShard) -> torch.device:
    return next(shard.parameters()).device


def _packed(shard: DecoderShard, work: InferenceWork) -> list[PackedSamples]:
    device = _device(shard)
    return [pack_samples([work.samples[i] for i in b], dtype=shard.dtype, device=device) for b in work.micro_batches]


def _cut(outputs: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    pieces: list[np.ndarray] = []
    for output, sizes in zip(outputs, counts, strict=True):
        pieces += [piece.double().cpu().numpy() for piece in output.split(list(sizes))]
    return pieces


@torch.no_grad()
def infer_logprobs(shard: DecoderShard, links: Links, work: InferenceWork, temperature: float) -> list[np.ndarray]:
    """Return per sample the log-probs [R] (float64 array) of its response tokens; [] off the last stage."""

    def head(hidden: Tensor, packed: PackedSamples) -> Tensor:
        rows = hidden.index_select(0, packed.rows)
        return token_logprobs(shard, rows, packed.targets, temperature=temperature)[0]

    packed = _packed(shard, work)
    outputs = run_forward(shard, links, packed, head)
    return work.in_order(_cut(outputs, [p.responses for p in packed])) if links.is_last else []


@torch.no_grad()
def infer_values(shard: DecoderShard, links: Links, work: InferenceWork) -> list[np.ndarray]:
    """Return per sample the values [R] (float64 array) before each response token; [] off the last stage."""

    def head(hidden: Tensor, packed: PackedSamples) -> Tensor:
        return shard.values(hidden.index_select(0, packed.rows))

    packed = _packed(shard, work)
    outputs = run_forward(shard, links, packed, head)
    return work.in_order(_cut(outputs, [p.responses for p in packed])) if links.is_last else []


@torch.no_grad()
def infer_scores(shard: DecoderShard, links: Links, work: InferenceWork) -> list[np.ndarray]:
    """Return per sample its reward score [1] (float64 array), read at its last token; [] off the last stage."""

    def head(hidden: Tensor, packed: PackedSamples) -> Tensor:
        return shard.scores(hidden.index_select(0, packed.rows))[:, 0]

    packed = [pack_whole([work.samples[i] for i in batch], device=_device(shard)) for batch in work.micro_batches]
    outputs = run_forward(shard, links, packed, head)
    return work.in_order(_cut(outputs, [[1] * len(p.responses) for p in packed])) if links.is_last else []
