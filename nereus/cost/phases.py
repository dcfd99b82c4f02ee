"""Operations of a model-stage's phases: generation, inference (forward passes only) and training of one step."""

from __future__ import annotations

import numpy as np

from nereus.cost.imbalance import fullest_share_excess
from nereus.cost.load import StepLoad
from nereus.cost.operations import Array, Operations, add_operations
from nereus.cost.options import Options
from nereus.cost.passes import (
    ModelSizes,
    PassLoad,
    StageShape,
    forward_operations,
    slowest_stage,
    training_operations,
    whole_model,
)
from nereus.cost.rates import Rates, ring_steps
from nereus.limits import PREFILL_TOKENS
from nereus.model.spec import ModelSpec

# Bytes a parameter that an optimizer step moves, in units of a master element: gradient read; weight and two moments
# read and written. The compute copy is written once more.
_OPTIMIZER_MOVES = 7
# On a CPU, drawing a token and taking it up costs so many times what the operations of a layer cost at the least.
# Measured on a tiny model: 23 of 320 us.
_CPU_LAYERS_A_DRAW = 0.07
# Matrices of a pipeline stage with fewer bytes stay in a processor's cache from one decoding pass to the next.
_CPU_CACHE_BYTES = 16 << 20


def inference_operations(spec: ModelSpec, options: Options, load: StepLoad, rates: Rates) -> Operations:
    """Return the operations of one forward pass over all samples of a step.

    m micro-batches through pp stages take the time of m passes of the slowest stage and the others' longest one.
    """
    share = np.ceil(load.samples / options.dp)
    batches = num_micro_batches(share, options)
    sizes = ModelSizes.of(spec, options)
    one, longest = _pass_loads(spec, load.samples, share, batches, options, load)
    slow = slowest_stage(spec, options, sizes, _head_share(spec, load))
    others = _others(spec, options, slow)
    is_piped = (options.pp > 1).astype(np.float64)
    return add_operations(
        forward_operations(spec, options, sizes, slow, one, rates).times(batches),
        forward_operations(spec, options, sizes, others, longest, rates).times(is_piped),
        _host_operations(rates, passes=batches),
    )


def _host_operations(rates: Rates, *, passes: Array, commands: float = 1.0) -> Operations:
    """Return what the host adds: to each pass where a device waits for it, else to each command and update alone.

    Where the host is the device, the overhead of a pass is that of its layers' operations, counted with these.
    """
    return Operations(host=passes if rates.kind.accelerator else np.full_like(passes, commands))


def training_phase_operations(
    spec: ModelSpec, options: Options, load: StepLoad, rates: Rates, *, interleave: int = 1
) -> Operations:
    """Return the operations of all updates of a step: passes, gradient sums and optimizer steps.

    One forward, one backward: m micro-batches take m times the slowest stage, and the pipeline fills and drains at the
    cost of the other stages' longest pass, a v-th of it with v chunks a device, which send v times as many messages.
    Every update waits for the replica with the fullest share of its minibatch.
    Source: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2.
    """
    minibatch = load.samples / load.minibatches
    share = np.ceil(np.round(minibatch, 9) / options.dp)
    batches = num_micro_batches(share, options)
    sizes = ModelSizes.of(spec, options)
    one, longest = _pass_loads(spec, minibatch, share, batches, options, load)
    slow = slowest_stage(spec, options, sizes, _head_share(spec, load))
    steady = training_operations(spec, options, sizes, slow, one, rates)
    filling = training_operations(spec, options, sizes, _others(spec, options, slow), longest, rates)
    filling = filling.times((options.pp > 1) / interleave)
    if interleave > 1:
        steady, filling = _more_messages(steady, interleave), _more_messages(filling, interleave)
    update = add_operations(
        steady.times(batches),
        filling,
        _update_operations(spec, options, sizes, slow, rates),
        _host_operations(rates, passes=batches),
    )
    return update.times(float(load.minibatches * load.epochs))


def _more_messages(operations: Operations, factor: int) -> Operations:
    count, work_s = dict(operations.count), dict(operations.work_s)
    count["p2p"], work_s["p2p"] = factor * count["p2p"], factor * work_s["p2p"]
    return Operations(count, work_s, operations.host)


def _update_operations(
    spec: ModelSpec, options: Options, sizes: ModelSizes, slow: StageShape, rates: Rates
) -> Operations:
    """Return the sum of gradients over replicas, and the optimizer step, of the largest rank."""
    parameters = largest_rank_elements(spec, options, sizes)
    gradients = parameters * rates.master_bytes
    step = parameters * (_OPTIMIZER_MOVES * rates.master_bytes + rates.element_bytes)
    return Operations(
        count={"dp_sync": ring_steps(options.dp)},
        work_s={"dp_sync": gradients * rates.data_parallel_byte_s(options), "gemm": step * rates.byte_s},
    )


def largest_rank_elements(spec: ModelSpec, options: Options, sizes: ModelSizes) -> Array:
    """Return the matrix elements of the largest rank: of the first stage with its embedding, or the last."""
    embedding = np.ceil(spec.vocab / options.tp) * spec.hidden
    first = np.ceil(spec.layers / options.pp) * sizes.layer_elements + embedding
    head = np.where((options.pp == 1) & spec.ties_head, 0.0, sizes.head_elements)
    last = np.floor(spec.layers / options.pp) * sizes.layer_elements + head
    return np.where(options.pp == 1, first + head, np.maximum(first, last))


def generation_operations(spec: ModelSpec, options: Options, load: StepLoad, rates: Rates) -> Operations:
    """Return the operations of generating all samples of a step with continuous batching.

    A replica's n samples decode in B slots (its micro-batch): n * mean / B steps while slots are refilled, and the
    longest response beyond the mean after that. The slots form up to pp waves that take turns through the stages, so
    a step takes as long as all waves in the slowest stage. A pass reads the stage's weights once, and of every slot
    the keys and values so far: time by memory bandwidth, or by the products where these take longer.
    Source: Pope et al. 2022, arXiv:2211.05102, section 2.
    """
    share = np.ceil(load.samples / options.dp)
    slots = np.minimum(options.micro_batch, share)
    # The first token of a response comes from its prompt's pass.
    steps = share * (load.response_tokens - 1.0) / slots + load.longest_tokens - load.response_tokens
    waves = np.minimum(options.pp, slots)
    sizes = ModelSizes.of(spec, options)
    slow = slowest_stage(spec, options, sizes, head_tokens=1.0)
    # With fewer slots than stages the pipeline has gaps: a step still passes all stages.
    passes = steps * waves
    gaps = options.pp / waves
    tokens = share * load.response_tokens
    elements = slow.layers * sizes.layer_elements + slow.head * sizes.head_elements
    reading = passes * elements * rates.element_bytes * rates.byte_s
    multiplying = 2.0 * elements * tokens * rates.flop_s
    if not rates.kind.accelerator:
        reading = np.where(elements * rates.element_bytes < _CPU_CACHE_BYTES, 0.0, reading)
    products = np.maximum(reading, multiplying)
    keys = _cached_tokens(spec, load) * share * slow.layers * sizes.kv * rates.element_bytes * rates.byte_s
    # Logits are written, and drawn from in float64.
    draws = slow.head * tokens * sizes.vocab * (rates.element_bytes + 8.0) * rates.byte_s
    message = tokens * spec.hidden * rates.element_bytes
    is_split, is_piped = (options.tp > 1).astype(np.float64), (options.pp > 1).astype(np.float64)
    decode = Operations(
        count={
            "decode": slow.layers * passes + (0.0 if rates.kind.accelerator else _CPU_LAYERS_A_DRAW * tokens),
            "all_reduce": 2.0 * slow.layers * passes * ring_steps(options.tp),
            "all_gather": 2.0 * passes * ring_steps(options.tp),
            "p2p": 2.0 * is_piped * passes,
        },
        work_s={
            "decode": products + keys + draws,
            "all_reduce": is_split * 2.0 * slow.layers * message * rates.tensor_parallel_byte_s(options),
            "p2p": is_piped * message * rates.pipeline_byte_s(options),
        },
    )
    decode = add_operations(decode, _host_operations(rates, passes=passes, commands=0.0)).times(gaps)
    refills = share / slots
    return add_operations(decode, _prefill_operations(spec, options, sizes, slow, share, refills, load, rates))


def _prefill_operations(
    spec: ModelSpec,
    options: Options,
    sizes: ModelSizes,
    slow: StageShape,
    share: Array,
    refills: Array,
    load: StepLoad,
    rates: Rates,
) -> Operations:
    """Return the operations of the prompts' passes: as many as their tokens need, and one whenever slots are filled."""
    passes = np.ceil(np.maximum(share * load.prompt_tokens / PREFILL_TOKENS, refills))
    each = share / passes
    one = PassLoad(each * load.prompt_tokens, each * load.prompt_tokens**2 / 2.0, each)
    forward = forward_operations(spec, options, sizes, slow, one, rates)
    return add_operations(forward.times(passes), _host_operations(rates, passes=passes))


def _cached_tokens(spec: ModelSpec, load: StepLoad) -> float:
    """Return the tokens whose keys and values one sample reads, summed over the steps of its response."""
    prompt, mean = load.prompt_tokens, load.response_tokens
    read = prompt * mean + (mean**2 + load.response_variance) / 2.0
    return read if spec.sliding_window is None else min(read, mean * spec.sliding_window)


def num_micro_batches(share: Array, options: Options) -> Array:
    """Return the micro-batches of a replica's share: as few as its size allows, but one for every pipeline stage."""
    return np.maximum(np.ceil(share / options.micro_batch), np.minimum(options.pp, share))


def _pass_loads(
    spec: ModelSpec, samples: float, share: Array, batches: Array, options: Options, load: StepLoad
) -> tuple[PassLoad, PassLoad]:
    """Return what goes through a pass of the replica with the fullest share of `samples`: in the mean, and at most."""
    fullest = fullest_share_excess(samples, options.dp) / batches
    longest = fullest + fullest_share_excess(share, batches)
    mean = share / batches
    return _pass_load(spec, mean, fullest, load), _pass_load(spec, mean, longest, load)


def _pass_load(spec: ModelSpec, samples: Array, excess: Array, load: StepLoad) -> PassLoad:
    """Return what goes through a pass of some samples that are longer than the mean, in all, by `excess` deviations."""
    more = excess * np.sqrt(load.response_variance)
    mean, pairs = load.sequence_tokens, load.causal_pairs(spec.sliding_window)
    rows = samples if spec.head == "score" else samples * load.response_tokens + more
    seen = mean if spec.sliding_window is None else min(mean, spec.sliding_window)  # by a token at a sample's end
    return PassLoad(samples * mean + more, samples * pairs + more * seen, rows)


def _head_share(spec: ModelSpec, load: StepLoad) -> float:
    return load.response_tokens / load.sequence_tokens if spec.head == "lm" else 0.0


def _others(spec: ModelSpec, options: Options, slow: StageShape) -> StageShape:
    """Return all stages but the slowest as one."""
    whole = whole_model(spec, options)
    return StageShape(whole.layers - slow.layers, whole.head - slow.head)
