"""Which prompts, minibatches, shares and micro-batches a step is made of.

Prompts and minibatches are functions of (seed, step, epoch) only. Shares and micro-batches are balanced by length;
they follow from the order and the lengths of the samples, never from timing, so the same plan repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from nereus.random import permutation


def order_of_minibatches(seed: int, step: int, epoch: int, num_samples: int, num_minibatches: int) -> list[list[int]]:
    """Return the sample indices of every minibatch of one epoch; sizes differ by at most 1.

    Raises:
        ValueError: there are more minibatches than samples.
    """
    if not 1 <= num_minibatches <= num_samples:
        raise ValueError(
            f"ppo.minibatches is {num_minibatches} for {num_samples} samples a step: take 1 to {num_samples}."
        )
    order = permutation(("minibatches", seed, step, epoch), num_samples).tolist()
    size, larger = divmod(num_samples, num_minibatches)
    minibatches, start = [], 0
    for i in range(num_minibatches):
        stop = start + size + (i < larger)
        minibatches.append(order[start:stop])
        start = stop
    return minibatches


def share_out(lengths: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Return the indices of the samples that each replica works on, balanced by total length.

    Args:
        lengths: tokens of each sample (or any measure of its work).
        num_replicas: at most the number of samples.

    Returns:
        One ascending list a replica, none of them empty; together they hold every index once.

    Raises:
        ValueError: there are more replicas than samples.
    """
    if not 1 <= num_replicas <= len(lengths):
        raise ValueError(f"dp is {num_replicas} for {len(lengths)} samples: take 1 to {len(lengths)}.")
    return _balance(lengths, num_replicas, most=len(lengths))


def pack_micro_batches(lengths: Sequence[int], most: int, at_least: int = 1) -> list[list[int]]:
    """Return the micro-batches of one replica's samples, balanced by total length.

    Args:
        lengths: tokens of each sample.
        most: samples that one micro-batch may hold.
        at_least: micro-batches wanted (a pipeline needs some to fill); fewer only if there are fewer samples.

    Returns:
        As few ascending lists of indices as `most` and `at_least` allow, none empty; [] without samples.
    """
    assert most >= 1 and at_least >= 1, (most, at_least)
    if not lengths:
        return []
    num_batches = max(-(-len(lengths) // most), min(at_least, len(lengths)))
    return _balance(lengths, num_batches, most)


def _balance(lengths: Sequence[int], num_bins: int, most: int) -> list[list[int]]:
    """Give the longest sample left to the bin with the smallest sum that has room; ties go to the lower index.

    Source: the longest-processing-time rule, Graham 1969; a sum is at most 4/3 of the best possible one where
    `most` doesn't bind. An empty bin comes before one that holds samples of length 0, so none stays empty.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = [0] * num_bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        open_bins = (b for b in range(num_bins) if len(bins[b]) < most)
        best = min(open_bins, key=lambda b: (sums[b], len(bins[b]), b))
        bins[best].append(index)
        sums[best] += lengths[index]
    return [sorted(one) for one in bins]


def prompt_indices(
    seed: int, num_prompts: int, first_sample: int, num_samples: int, samples_per_prompt: int
) -> list[int]:
    """Return which prompt each of the samples [first_sample, first_sample + num_samples) answers.

    Sample ids count over the whole run. `samples_per_prompt` consecutive ids share a prompt slot; slot i takes
    entry i % num_prompts of the permutation of the file keyed by (seed, i // num_prompts).
    """
    assert num_prompts >= 1 and samples_per_prompt >= 1, (num_prompts, samples_per_prompt)
    indices = []
    for sample in range(first_sample, first_sample + num_samples):
        epoch, place = divmod(sample // samples_per_prompt, num_prompts)
        indices.append(int(permutation(("prompts", seed, epoch), num_prompts)[place]))
    return indices
