"""Bytes that forward and backward passes of one rank hold: a mirror of what the decoder's operations keep.

Elements are in the compute dtype; `lifted` ones in at least float32. Weights' gradients go to their buffer block by
block, so none of a weight's size is made beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nereus.layout import Layout, partition, slices_of, stage_layers
from nereus.limits import GRADIENT_BLOCK_ELEMENTS, logits_bytes, logits_chunk_rows
from nereus.model.spec import ModelSpec, tensors

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}
# Of `token_ids`, positions, rows, targets and columns, bytes a token.
PACKED_TOKEN_BYTES = 64


@dataclass(frozen=True)
class RankSizes:
    """The sizes of one rank's part of a model; `vocab` is 0 where the rank has no vocabulary head."""

    spec: ModelSpec
    layout: Layout
    stage: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    is_first: bool
    is_last: bool
    matrix_elements: int

    @property
    def query(self) -> int:
        """Elements a token of all local query heads."""
        return self.heads * self.spec.head_dim

    @property
    def qkv(self) -> int:
        """Elements a token of local queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.spec.head_dim


def lifted_bytes(precision: str) -> int:
    """Return the bytes of an element where math is lifted to at least float32."""
    return max(4, COMPUTE_BYTES[precision])


@lru_cache(maxsize=4096)
def rank_sizes(spec: ModelSpec, layout: Layout, rank: int) -> RankSizes:
    """Return the local sizes of a rank, uneven splits included."""
    stage, tp_rank = layout.stage(rank), layout.tp_rank(rank)
    is_first, is_last = stage == 0, stage == layout.pp - 1

    def local(units: int) -> int:
        start, stop = partition(units, layout.tp)[tp_rank]
        return stop - start

    places = tensors(spec)
    in_layers = sum(
        part.num_elements
        for part in slices_of(spec, layout, rank)
        if isinstance(places[part.name].place, int) and len(part.sizes) == 2
    )
    rows = {"lm": local(spec.vocab), "value": 1, "score": spec.num_labels}[spec.head] if is_last else 0
    return RankSizes(
        spec=spec,
        layout=layout,
        stage=stage,
        layers=len(stage_layers(spec, layout, stage)),
        heads=local(spec.kv_heads) * spec.group_size,
        kv_heads=local(spec.kv_heads),
        intermediate=local(spec.intermediate),
        vocab=local(spec.vocab) if is_last and spec.head == "lm" else 0,
        is_first=is_first,
        is_last=is_last,
        matrix_elements=in_layers + rows * spec.hidden,
    )


def _layer_bytes(sizes: RankSizes, precision: str) -> int:
    """Return the bytes a token that autograd keeps of one decoder layer.

    Both residual inputs and both norms' outputs; queries, keys and values (before and after their norms, if any) and
    the attention output; gate, up and the product that enters `down`. Lifted: the norms' scales and the attention's
    log-sum-exp.
    """
    norms = 1 if sizes.spec.qk_norm else 0
    elements = 4 * sizes.spec.hidden + (1 + norms) * sizes.qkv + sizes.query + 3 * sizes.intermediate
    lifted = 2 + sizes.heads + norms * (sizes.heads + sizes.kv_heads)
    return elements * COMPUTE_BYTES[precision] + lifted * lifted_bytes(precision)


def _ends_bytes(sizes: RankSizes, precision: str) -> int:
    """Return the bytes a token kept beside the layers: rotary angles, and the last layer's output (and its norm)."""
    outputs = 2 if sizes.is_last else 1
    return outputs * sizes.spec.hidden * COMPUTE_BYTES[precision] + sizes.spec.head_dim * lifted_bytes(precision)


def _sequence_bytes(sizes: RankSizes, sequence_tokens: int, precision: str) -> int:
    """Return the bytes that attention makes for one sequence at a time: lifted copies, and the mask of a window."""
    window = sizes.spec.sliding_window
    masked = window is not None and window < sequence_tokens
    # A mask is made of a distance (int64) and three tensors of one byte an element.
    mask = sequence_tokens**2 * (11 + lifted_bytes(precision)) if masked else 0
    return sequence_tokens * 4 * sizes.query * lifted_bytes(precision) + mask


def forward_bytes(sizes: RankSizes, num_tokens: int, sequence_tokens: int, precision: str) -> int:
    """Return the bytes of a forward pass that keeps nothing for a backward pass.

    Args:
        num_tokens: tokens of the micro-batch.
        sequence_tokens: tokens of its longest sequence.
    """
    spec, size = sizes.spec, COMPUTE_BYTES[precision]
    norms = 1 if spec.qk_norm else 0
    attention = (2 * spec.hidden + (1 + norms) * sizes.qkv + sizes.query) * size
    rotation = (sizes.qkv - sizes.query // 2) * lifted_bytes(precision)
    mlp = (3 * spec.hidden + 3 * sizes.intermediate) * size
    norm = 2 * spec.hidden * size + 2 * spec.hidden * lifted_bytes(precision)
    in_flight = 3 * spec.hidden * size if sizes.layout.pp > 1 else 0
    each = max(attention + rotation, mlp, norm) + in_flight + spec.head_dim * lifted_bytes(precision)
    return num_tokens * each + _sequence_bytes(sizes, sequence_tokens, precision)


def _backward_bytes(sizes: RankSizes, precision: str) -> int:
    """Return the bytes a token that the backward pass of one layer makes beside what the forward pass kept.

    The MLP's are the most: the gradients of its product, of gate and up, and a buffer, less the product kept before.
    Where the head dim is large against the MLP, those of queries, keys and values are.
    """
    size = COMPUTE_BYTES[precision]
    mlp = 3 * sizes.intermediate
    attention = sizes.query + 2 * sizes.qkv - 3 * sizes.intermediate
    norm = 2 * sizes.spec.hidden * (lifted_bytes(precision) // size) - 3 * sizes.intermediate
    in_flight = 3 if sizes.layout.pp > 1 else 0
    return (max(mlp, attention, norm) + (1 + in_flight) * sizes.spec.hidden) * size


def _gradient_bytes(rows: int, columns: int, num_tokens: int, precision: str) -> int:
    """Return the bytes of one block of a weight's gradient [rows, columns] and of the transposed copy it's made of."""
    step = min(rows, max(1, GRADIENT_BLOCK_ELEMENTS // columns))
    return step * (columns + num_tokens) * COMPUTE_BYTES[precision]


def training_moments(
    sizes: RankSizes,
    *,
    live_tokens: int,
    tokens: int,
    rows: int,
    sequence_tokens: int,
    recompute: bool,
    precision: str,
) -> tuple[dict[str, int], ...]:
    """Return what the two hungriest moments of a pipeline stage's training hold, by kind.

    They are: the head's log-probs and gradients, with all activations kept, and the last layer's backward pass.

    Args:
        live_tokens: tokens of all micro-batches whose forward pass is done and whose backward pass isn't.
        tokens: tokens of one micro-batch.
        rows: response tokens of one micro-batch.
        sequence_tokens: tokens of the longest sample.
    """
    hidden, size = sizes.spec.hidden, COMPUTE_BYTES[precision]
    layer = _layer_bytes(sizes, precision)
    a_token = sizes.layers * (hidden * size if recompute else layer) + _ends_bytes(sizes, precision)
    kept = live_tokens * (a_token + PACKED_TOKEN_BYTES)
    again = layer if recompute else 0
    backward = tokens * (again + _backward_bytes(sizes, precision)) + _sequence_bytes(sizes, sequence_tokens, precision)
    # An MLP's matrix is the largest of a layer; its gradient is made when two of the MLP's intermediates are gone.
    block = _gradient_bytes(2 * sizes.intermediate, hidden, tokens, precision)
    # The head's input and its gradient.
    selected = 2 * rows * hidden * size if sizes.is_last else 0
    chunk = logits_chunk_rows(rows, sizes.vocab, size) if sizes.vocab else 0
    return (
        {
            "activations": kept + selected,
            "logits": head_bytes(sizes, rows, precision),
            "workspace": _gradient_bytes(sizes.vocab, hidden, chunk, precision),
        },
        {
            "activations": kept + backward,
            "workspace": max(0, block - 2 * tokens * sizes.intermediate * size),
        },
    )


def head_bytes(sizes: RankSizes, num_rows: int, precision: str) -> int:
    """Return the bytes that the log-probs of `num_rows` response tokens hold beside the head's input."""
    return logits_bytes(num_rows, sizes.vocab, COMPUTE_BYTES[precision])


def decoding_bytes(sizes: RankSizes, num_slots: int, sequence_tokens: int, precision: str) -> int:
    """Return the bytes of one decoding pass beside its logits: layer by layer hidden states and attention scores."""
    scores = sequence_tokens * (3 * sizes.heads + 2) * lifted_bytes(precision)
    return num_slots * scores + forward_bytes(sizes, num_slots, 1, precision)


def sampling_bytes(sizes: RankSizes, num_rows: int, precision: str) -> int:
    """Return the bytes of one decoding pass's logits and of drawing tokens from them."""
    if not sizes.vocab:
        return 0
    gathered = 2 * num_rows * sizes.spec.vocab if sizes.layout.tp > 1 else 0  # top-p sampling looks at all of them
    # Exponentials of four rows at once in float64, or two of a whole row.
    return (num_rows * sizes.vocab + gathered) * COMPUTE_BYTES[precision] + 4 * sizes.spec.vocab * 8
