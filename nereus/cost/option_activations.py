"""The bytes of `activations` for many ranks at once: the same formulas on arrays, and tested to be the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nereus.cost.activations import COMPUTE_BYTES, PACKED_TOKEN_BYTES, lifted_bytes
from nereus.limits import (
    GRADIENT_BLOCK_ELEMENTS,
    LOGITS_BLOCK_BYTES,
    LOGITS_BUFFER_BYTES,
    REDUCE_SLOT_BYTES,
    REDUCE_WHOLE_BYTES,
)
from nereus.model.spec import ModelSpec

Bytes = NDArray[Any]  # of int64


@dataclass(frozen=True)
class Ranks:
    """The sizes of `RankSizes` as int64 arrays [n], one rank an option."""

    spec: ModelSpec
    tp: Bytes
    pp: Bytes
    stage: Bytes
    layers: Bytes
    heads: Bytes
    kv_heads: Bytes
    intermediate: Bytes
    vocab: Bytes
    is_last: NDArray[np.bool_]
    matrix_elements: Bytes
    parameters: Bytes

    @cached_property
    def query(self) -> Bytes:
        return self.heads * self.spec.head_dim

    @cached_property
    def qkv(self) -> Bytes:
        return (self.heads + 2 * self.kv_heads) * self.spec.head_dim

    @cached_property
    def in_flight(self) -> Bytes:
        """Tensors of hidden states on their way between pipeline stages."""
        return np.where(self.pp > 1, 3, 0)


def _layer_bytes(ranks: Ranks, precision: str) -> Bytes:
    norms = 1 if ranks.spec.qk_norm else 0
    elements = 4 * ranks.spec.hidden + (1 + norms) * ranks.qkv + ranks.query + 3 * ranks.intermediate
    lifted = 2 + ranks.heads + norms * (ranks.heads + ranks.kv_heads)
    return elements * COMPUTE_BYTES[precision] + lifted * lifted_bytes(precision)


def _ends_bytes(ranks: Ranks, precision: str) -> Bytes:
    outputs = np.where(ranks.is_last, 2, 1)
    return outputs * ranks.spec.hidden * COMPUTE_BYTES[precision] + ranks.spec.head_dim * lifted_bytes(precision)


def _sequence_bytes(ranks: Ranks, sequence_tokens: int, precision: str) -> Bytes:
    window = ranks.spec.sliding_window
    masked = window is not None and window < sequence_tokens
    mask = sequence_tokens**2 * (11 + lifted_bytes(precision)) if masked else 0
    return sequence_tokens * 4 * ranks.query * lifted_bytes(precision) + mask


def forward_bytes(ranks: Ranks, num_tokens: Bytes | int, sequence_tokens: int, precision: str) -> Bytes:
    """Return the bytes of a forward pass that keeps nothing for a backward pass."""
    spec, size = ranks.spec, COMPUTE_BYTES[precision]
    norms = 1 if spec.qk_norm else 0
    attention = (2 * spec.hidden + (1 + norms) * ranks.qkv + ranks.query) * size
    rotation = (ranks.qkv - ranks.query // 2) * lifted_bytes(precision)
    mlp = (3 * spec.hidden + 3 * ranks.intermediate) * size
    norm = 2 * spec.hidden * size + 2 * spec.hidden * lifted_bytes(precision)
    most = np.maximum(np.maximum(attention + rotation, mlp), norm)
    each = most + ranks.in_flight * spec.hidden * size + spec.head_dim * lifted_bytes(precision)
    return num_tokens * each + _sequence_bytes(ranks, sequence_tokens, precision)


def _backward_bytes(ranks: Ranks, precision: str) -> Bytes:
    size = COMPUTE_BYTES[precision]
    mlp = 3 * ranks.intermediate
    attention = ranks.query + 2 * ranks.qkv - mlp
    norm = 2 * ranks.spec.hidden * (lifted_bytes(precision) // size) - mlp
    most = np.maximum(np.maximum(mlp, attention), norm)
    return (most + (1 + ranks.in_flight) * ranks.spec.hidden) * size


def _gradient_bytes(rows: Bytes, columns: int, num_tokens: Bytes | int, precision: str) -> Bytes:
    step = np.minimum(rows, max(1, GRADIENT_BLOCK_ELEMENTS // columns))
    return step * (columns + num_tokens) * COMPUTE_BYTES[precision]


def _chunk_rows(ranks: Ranks, num_rows: Bytes, precision: str) -> Bytes:
    """Return the rows of logits held at once, 0 without a vocabulary head."""
    most = LOGITS_BUFFER_BYTES // np.maximum(1, ranks.vocab * COMPUTE_BYTES[precision])
    return np.where(ranks.vocab > 0, np.maximum(1, np.minimum(num_rows, most)), 0)


def head_bytes(ranks: Ranks, num_rows: Bytes, precision: str) -> Bytes:
    """Return the bytes that the log-probs of `num_rows` response tokens hold beside the head's input."""
    lifted_row = np.maximum(1, ranks.vocab * lifted_bytes(precision))
    block = np.minimum(num_rows, np.maximum(1, LOGITS_BLOCK_BYTES // lifted_row)) * lifted_row
    logits = _chunk_rows(ranks, num_rows, precision) * ranks.vocab * COMPUTE_BYTES[precision] + 3 * block
    return np.where(ranks.vocab > 0, logits, 0)


def decoding_bytes(ranks: Ranks, num_slots: Bytes, sequence_tokens: int, precision: str) -> Bytes:
    """Return the bytes of one decoding pass beside its logits."""
    scores = sequence_tokens * (3 * ranks.heads + 2) * lifted_bytes(precision)
    return num_slots * scores + forward_bytes(ranks, num_slots, 1, precision)


def sampling_bytes(ranks: Ranks, num_rows: Bytes, precision: str) -> Bytes:
    """Return the bytes of one decoding pass's logits and of drawing tokens from them."""
    gathered = np.where(ranks.tp > 1, 2 * num_rows * ranks.spec.vocab, 0)
    logits = (num_rows * ranks.vocab + gathered) * COMPUTE_BYTES[precision] + 4 * ranks.spec.vocab * 8
    return np.where(ranks.vocab > 0, logits, 0)


def reduce_slots_bytes(num_ranks: Bytes, message_bytes: Bytes) -> Bytes:
    """Return the bytes of slots that a rank touches while its group sums messages; see `nereus.limits`."""
    whole = num_ranks * np.minimum(message_bytes, REDUCE_WHOLE_BYTES)
    slots = 2 * np.maximum(whole, (3 * num_ranks - 2) * np.minimum(message_bytes, REDUCE_SLOT_BYTES) // num_ranks)
    return np.where(num_ranks > 1, slots, 0)


def gather_slots_bytes(num_ranks: Bytes, part_bytes: Bytes) -> Bytes:
    """Return the bytes of slots that a rank touches while its group gathers parts; see `nereus.limits`."""
    return np.where(num_ranks > 1, 2 * num_ranks * np.minimum(part_bytes, REDUCE_SLOT_BYTES), 0)


def training_bytes(
    ranks: Ranks,
    *,
    live_tokens: Bytes,
    tokens: Bytes,
    rows: Bytes,
    sequence_tokens: int,
    recompute: NDArray[np.bool_],
    precision: str,
) -> tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]:
    """Return (activations, others) of the two moments of `training_moments`."""
    hidden, size = ranks.spec.hidden, COMPUTE_BYTES[precision]
    layer = _layer_bytes(ranks, precision)
    a_token = ranks.layers * np.where(recompute, hidden * size, layer) + _ends_bytes(ranks, precision)
    kept = live_tokens * (a_token + PACKED_TOKEN_BYTES)
    again = np.where(recompute, layer, 0)
    backward = tokens * (again + _backward_bytes(ranks, precision)) + _sequence_bytes(ranks, sequence_tokens, precision)
    block = _gradient_bytes(2 * ranks.intermediate, hidden, tokens, precision)
    selected = np.where(ranks.is_last, 2 * rows * hidden * size, 0)
    head = head_bytes(ranks, rows, precision)
    head_block = _gradient_bytes(ranks.vocab, hidden, _chunk_rows(ranks, rows, precision), precision)
    spare = np.maximum(0, block - 2 * tokens * ranks.intermediate * size)
    return (kept + selected, head + head_block), (kept + backward, spare)
