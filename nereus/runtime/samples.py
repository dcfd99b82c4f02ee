"""Samples as they travel to workers, and their packing into micro-batches without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nereus.model.batch import PackedBatch


@dataclass(frozen=True)
class Sample:
    """A prompt with its response.

    `tokens` is [P + R] int64; `columns` holds per-response-token arrays [R] such as "old_logprobs" or "advantages".
    Example: prompt 3 tokens, response 2: the hidden states at positions 2 and 3 predict the response.
    """

    tokens: np.ndarray
    prompt_tokens: int
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def response_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True)
class Minibatch:
    """One update's work of one replica: its micro-batches as lists of sample indices.

    `response_tokens` counts the whole minibatch over all replicas: every gradient is a sum, divided once by it.
    """

    micro_batches: tuple[tuple[int, ...], ...]
    response_tokens: int


@dataclass(frozen=True)
class PackedSamples:
    """A micro-batch laid end to end: the last token of each sample is not fed, since nothing is predicted from it.

    Shapes: `token_ids` [N]; `rows` [M] the positions in N that predict the M response tokens; `targets` [M].
    `rows_per_sample` adds up to M.
    """

    batch: PackedBatch
    token_ids: Tensor
    rows: Tensor
    targets: Tensor
    rows_per_sample: tuple[int, ...]
    columns: Mapping[str, Tensor]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def pack_samples(samples: Sequence[Sample], *, dtype: torch.dtype, device: torch.device) -> PackedSamples:
    """Lay samples end to end; columns are cast to `dtype`."""
    lengths = tuple(len(s.tokens) - 1 for s in samples)
    starts = np.cumsum((0, *lengths[:-1]))
    rows = [
        np.arange(start + s.prompt_tokens - 1, start + len(s.tokens) - 1)
        for start, s in zip(starts, samples, strict=True)
    ]
    targets = [s.tokens[s.prompt_tokens :] for s in samples]
    names = samples[0].columns.keys()
    columns = {name: np.concatenate([s.columns[name] for s in samples]) for name in names}
    return PackedSamples(
        batch=PackedBatch.of(lengths, device=device),
        token_ids=torch.from_numpy(np.concatenate([s.tokens[:-1] for s in samples])).to(device),
        rows=torch.from_numpy(np.concatenate(rows)).to(device),
        targets=torch.from_numpy(np.concatenate(targets)).to(device),
        rows_per_sample=tuple(s.response_tokens for s in samples),
        columns={name: torch.from_numpy(column).to(device, dtype) for name, column in columns.items()},
    )


def pack_whole(samples: Sequence[Sample], *, device: torch.device) -> PackedSamples:
    """Lay whole samples end to end, every token fed; `rows` are their last tokens, where a reward model is read."""
    lengths = tuple(len(s.tokens) for s in samples)
    token_ids = torch.from_numpy(np.concatenate([s.tokens for s in samples])).to(device)
    rows = torch.tensor(np.cumsum(lengths) - 1, device=device)
    return PackedSamples(
        batch=PackedBatch.of(lengths, device=device),
        token_ids=token_ids,
        rows=rows,
        targets=token_ids.index_select(0, rows),
        rows_per_sample=(1,) * len(samples),
        columns={},
    )
