"""Operations of one pass through a model: what a pipeline stage computes and sends for some tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.cost.operations import Array, Operations
from nereus.cost.options import Options
from nereus.cost.rates import Rates, ring_steps
from nereus.limits import LOGITS_BUFFER_BYTES
from nereus.model.spec import ModelSpec

# The backward pass of attention computes five matrix products where the forward pass computes two.
# Source: Dao 2023, arXiv:2307.08691, section 4.1.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one layer and the head on the widest tp rank, arrays [n] over options.

    `layer_elements` and `head_elements` are those of the matrices; `query` and `qkv` elements a token.
    """

    layer_elements: Array
    head_elements: Array
    query: Array
    qkv: Array
    intermediate: Array
    kv: Array
    vocab: Array

    @classmethod
    def of(cls, spec: ModelSpec, options: Options) -> ModelSizes:
        kv_heads = np.ceil(spec.kv_heads / options.tp)
        query = kv_heads * spec.group_size * spec.head_dim
        kv = 2.0 * kv_heads * spec.head_dim
        intermediate = np.ceil(spec.intermediate / options.tp)
        rows = {"lm": np.ceil(spec.vocab / options.tp), "value": 1.0 + 0 * query, "score": spec.num_labels + 0 * query}
        head = rows[spec.head]
        return cls(
            layer_elements=spec.hidden * (2.0 * query + kv + 3.0 * intermediate),
            head_elements=spec.hidden * head,
            query=query,
            qkv=query + kv,
            intermediate=intermediate,
            kv=kv,
            vocab=head,
        )


@dataclass(frozen=True)
class StageShape:
    """Layers of a pipeline stage, and 1.0 where it has the head; arrays [n]."""

    layers: Array
    head: Array


def slowest_stage(spec: ModelSpec, options: Options, sizes: ModelSizes, head_tokens: float) -> StageShape:
    """Return the stage with most matrix elements to multiply by: the first, or the last with its head.

    Args:
        head_tokens: tokens that enter the head for each token that enters a layer.
    """
    first = np.ceil(spec.layers / options.pp)
    last = np.floor(spec.layers / options.pp)
    of_last = last * sizes.layer_elements + head_tokens * sizes.head_elements
    is_last = (options.pp == 1) | (of_last > first * sizes.layer_elements)
    return StageShape(np.where(is_last, last, first), is_last.astype(np.float64))


def whole_model(spec: ModelSpec, options: Options) -> StageShape:
    """Return all stages as one."""
    one = np.ones_like(options.dp)
    return StageShape(spec.layers * one, one)


@dataclass(frozen=True)
class PassLoad:
    """What goes through a pass: tokens, (query, key) pairs, and rows that enter the head; arrays [n]."""

    tokens: Array
    pairs: Array
    rows: Array


def forward_operations(
    spec: ModelSpec, options: Options, sizes: ModelSizes, shape: StageShape, load: PassLoad, rates: Rates
) -> Operations:
    """Return the operations of a forward pass through a stage.

    gemm: 2 FLOPs an element of a matrix and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and the bytes
    of the passes between the products (norms, rotation, residual sums, gate, log-softmax), which are bound by memory.
    attention: 4 FLOPs a (query, key) pair and query element, pairs of the causal half only.
    all_reduce: two tensors [tokens, hidden] a layer (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
    p2p: one tensor [tokens, hidden] from stage to stage.

    The latency of gemm is paid for each layer: on a CPU it's what the operations of a layer take however few tokens
    there are.
    """
    message = load.tokens * spec.hidden * rates.element_bytes
    is_split, is_piped = (options.tp > 1).astype(np.float64), (options.pp > 1).astype(np.float64)
    return Operations(
        count={
            "gemm": shape.layers,
            "all_reduce": 2.0 * shape.layers * ring_steps(options.tp),
            "p2p": is_piped,
        },
        work_s={
            "gemm": layers_s(spec, sizes, shape, load, rates) + head_s(sizes, shape, load, rates),
            "attention": 4.0 * shape.layers * load.pairs * sizes.query * rates.flop_s,
            "all_reduce": is_split * 2.0 * shape.layers * message * rates.tensor_parallel_byte_s(options),
            "p2p": is_piped * message * rates.pipeline_byte_s(options),
        },
    )


def layers_s(spec: ModelSpec, sizes: ModelSizes, shape: StageShape, load: PassLoad, rates: Rates) -> Array:
    """Return the seconds of a forward pass's products in the layers, and of what passes between them.

    A layer: two norms (read and write hidden), two residual sums (read two, write one), rotation (read and write
    queries, keys and values), the gate (read two, write one).
    """
    products = shape.layers * load.tokens * 2.0 * sizes.layer_elements * rates.flop_s
    return products + _between_s(spec, sizes, shape, load, rates)


def _between_s(spec: ModelSpec, sizes: ModelSizes, shape: StageShape, load: PassLoad, rates: Rates) -> Array:
    """Return the seconds of what passes between a forward pass's products in the layers; see `layers_s`."""
    elements = 10.0 * spec.hidden + 2.0 * sizes.qkv + 3.0 * sizes.intermediate
    return shape.layers * load.tokens * elements * (rates.element_bytes * rates.byte_s)


def head_s(sizes: ModelSizes, shape: StageShape, load: PassLoad, rates: Rates) -> Array:
    """Return the seconds of a forward pass's product with the head, and of log-softmax, which reads logits twice."""
    each = 2.0 * sizes.head_elements * rates.flop_s + 2.0 * sizes.vocab * (rates.element_bytes * rates.byte_s)
    return shape.head * load.rows * each


def training_operations(
    spec: ModelSpec, options: Options, sizes: ModelSizes, shape: StageShape, load: PassLoad, rates: Rates
) -> Operations:
    """Return the operations of a forward and a backward pass through a stage, with recomputation where it is on.

    The backward pass has twice the products of the forward one, attention 2.5 times; it sends and all-reduces as much.
    Recomputation repeats the forward pass of the layers. A head whose logits are too many to be kept computes them
    again. Gradients are added to their buffer once a micro-batch: read and written in at least float32. On a CPU, where
    no kernels are fused, what passes between the products of a backward pass is three times the forward pass's.
    """
    forward = forward_operations(spec, options, sizes, shape, load, rates)
    again = options.recompute.astype(np.float64)
    layers_again = again * layers_s(spec, sizes, shape, load, rates)
    chunked = load.rows * sizes.vocab * rates.element_bytes > LOGITS_BUFFER_BYTES
    head_again = chunked * shape.head * (2.0 * sizes.head_elements * load.rows * rates.flop_s)
    elements = shape.layers * sizes.layer_elements + shape.head * sizes.head_elements
    accumulate = 2.0 * elements * rates.master_bytes * rates.byte_s
    unfused = 0.0 if rates.kind.accelerator else _between_s(spec, sizes, shape, load, rates)
    work = forward.work_s
    return Operations(
        count={
            "gemm": (3.0 + again) * forward.count["gemm"],
            "all_reduce": (2.0 + again) * forward.count["all_reduce"],
            "p2p": 2.0 * forward.count["p2p"],
        },
        work_s={
            "gemm": 3.0 * work["gemm"] + layers_again + head_again + accumulate + unfused,
            "attention": (1.0 + ATTENTION_BACKWARD + again) * work["attention"],
            "all_reduce": (2.0 + again) * work["all_reduce"],
            "p2p": 2.0 * work["p2p"],
        },
    )
