"""Bytes that forward and backward passes of one rank keep: a mirror of what the decoder's operations save."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nereus.layout import Layout, partition, slices_of, stage_layers
from nereus.model.spec import ModelSpec, tensors

COMPUTE_BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class RankSizes:
    """The sizes of one rank's part of the model; `vocab` is 0 where the rank has no vocabulary head."""

    stage: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    is_last: bool
    matrix_elements: int
    largest_tensor_elements: int


@lru_cache(maxsize=4096)
def rank_sizes(spec: ModelSpec, layout: Layout, rank: int) -> RankSizes:
    """Return the local sizes of a rank, uneven splits included."""
    stage, tp_rank = layout.stage(rank), layout.tp_rank(rank)

    def local(units: int) -> int:
        start, stop = partition(units, layout.tp)[tp_rank]
        return stop - start

    is_last = stage == layout.pp - 1
    held = {part.name: part for part in slices_of(spec, layout, rank)}
    infos = tensors(spec)
    # The matrices that multiply activations: those of layers, and the head; an untied embedding is only looked up.
    head = "model.embed_tokens.weight" if spec.ties_head else "lm_head.weight"
    multiplied = sum(
        part.num_elements
        for name, part in held.items()
        if len(part.sizes) == 2 and (isinstance(infos[name].place, int) or (is_last and name == head))
    )
    return RankSizes(
        stage=stage,
        layers=len(stage_layers(spec, layout, stage)),
        heads=local(spec.kv_heads) * spec.group_size,
        kv_heads=local(spec.kv_heads),
        intermediate=local(spec.intermediate),
        vocab=local(spec.vocab) if is_last and spec.head == "lm" else 0,
        is_last=is_last,
        matrix_elements=multiplied,
        largest_tensor_elements=max((part.num_elements for part in held.values()), default=0),
    )


def _attention_elements(sizes: RankSizes, spec: ModelSpec) -> tuple[int, int]:
    """Return the elements a token of all local query heads, and of keys and values together."""
    return sizes.heads * spec.head_dim, 2 * sizes.kv_heads * spec.head_dim


def layer_saved_elements(sizes: RankSizes, spec: ModelSpec) -> int:
    """Return the elements a token that autograd keeps of one decoder layer.

    Two residual inputs and two norms' outputs; queries, keys, values and the attention output; gate, up, the
    activated gate and its product with up.
    """
    q, kv = _attention_elements(sizes, spec)
    return 4 * spec.hidden + 3 * q + 2 * kv + 4 * sizes.intermediate


def layer_working_elements(sizes: RankSizes, spec: ModelSpec) -> int:
    """Return the elements a token that one layer holds at once while it runs without keeping anything."""
    q, kv = _attention_elements(sizes, spec)
    return 3 * spec.hidden + max(3 * q + 2 * kv, 4 * sizes.intermediate)


def working_bytes(sizes: RankSizes, spec: ModelSpec, num_tokens: int, precision: str) -> int:
    """Return the bytes of a forward pass over `num_tokens` tokens that keeps nothing for a backward pass."""
    return num_tokens * layer_working_elements(sizes, spec) * COMPUTE_BYTES[precision]


def saved_bytes(
    sizes: RankSizes, spec: ModelSpec, *, live_tokens: int, one_tokens: int, recompute: bool, precision: str
) -> int:
    """Return the bytes of activations at the moment when the first backward pass of a pipeline stage starts.

    Args:
        live_tokens: tokens of all micro-batches whose forward pass is done and whose backward pass isn't.
        one_tokens: tokens of one micro-batch, whose gradients are made on top.
        recompute: each layer keeps only its input; one layer at a time is run again.
    """
    size = COMPUTE_BYTES[precision]
    layer = layer_saved_elements(sizes, spec)
    working = layer_working_elements(sizes, spec)
    if recompute:
        return (live_tokens * sizes.layers * spec.hidden + one_tokens * (layer + working)) * size
    return (live_tokens * sizes.layers * layer + one_tokens * working) * size


def logits_bytes(sizes: RankSizes, num_rows: int, precision: str, *, training: bool) -> int:
    """Return the bytes that the log-probs of `num_rows` response tokens need on the last pipeline stage."""
    copies = 2 if training else 1
    return copies * num_rows * sizes.vocab * max(4, COMPUTE_BYTES[precision])


def sampling_bytes(sizes: RankSizes, spec: ModelSpec, num_rows: int, tp: int, precision: str) -> int:
    """Return the bytes of one decoding pass's logits and of drawing tokens from them."""
    if not sizes.vocab:
        return 0
    whole = 2 * num_rows * spec.vocab if tp > 1 else 0  # top-p sampling gathers the vocabulary
    return (num_rows * sizes.vocab + whole) * COMPUTE_BYTES[precision] + 4 * sizes.vocab * 8
