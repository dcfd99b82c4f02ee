"""Counter-based randomness: every number is a function of its key and its position, never of what was drawn before.

The generator is Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), of which numpy
gives the raw 64-bit output; the key is a 128-bit hash of a purpose and the numbers that name the stream. Only raw
output is used, because numpy keeps that stable over its versions, and its distributions not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import xxhash

WORDS_PER_BLOCK = 4  # Philox4x64 makes four 64-bit words of one counter


def raw_words(key: Sequence[int | str], start: int, count: int) -> np.ndarray:
    """Return words [start, start + count) of the stream named by `key`, as uint64."""
    digest = xxhash.xxh3_128_intdigest(json.dumps(list(key)).encode())
    words = np.array([digest >> 64, digest & (2**64 - 1)], dtype=np.uint64)
    block, skipped = divmod(start, WORDS_PER_BLOCK)
    return np.random.Philox(key=words, counter=[block, 0, 0, 0]).random_raw(skipped + count)[skipped:]


def uniforms(seed: int, step: int, sample_id: int, count: int, start: int = 0) -> np.ndarray:
    """Return the sampling noise of a response: [count] float64 in [0, 1), 53 bits each.

    Entry i belongs to the response's token at position `start + i`, whatever `start` and `count` are.
    """
    words = raw_words(("sampling", seed, step, sample_id), start, count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=8)
def _permutation(key: tuple[int | str, ...], num_items: int) -> np.ndarray:
    order = np.argsort(raw_words(key, 0, num_items), kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


def permutation(key: Sequence[int | str], num_items: int) -> np.ndarray:
    """Return a permutation of range(num_items) that depends on `key` only, as read-only int64 [num_items].

    `key` starts with the purpose, so two uses of one seed share nothing: ("minibatches", seed, step, epoch).
    """
    return _permutation(tuple(key), num_items)


def normal_slice(
    seed: int, role: str, name: str, shape: Sequence[int], row_start: int, row_stop: int, std: float
) -> np.ndarray:
    """Return rows [row_start, row_stop) of a normally distributed tensor without drawing the others.

    Element i of the row-major tensor is std * ndtri(u_i) with u_i = (52 bits of word i + 1/2) / 2^52, which is
    never 0 or 1, so the largest magnitude is 8.2 std.

    Args:
        seed: of the run.
        role: whose tensor it is ("actor", "critic", ...).
        name: the tensor's canonical name.
        shape: of the whole tensor; rows are its dimension 0.
        row_start: first row.
        row_stop: row after the last.
        std: standard deviation; the mean is 0.

    Returns:
        float64 [row_stop - row_start, *shape[1:]].
    """
    shape = tuple(int(size) for size in shape)
    assert shape and 0 <= row_start <= row_stop <= shape[0], (name, shape, row_start, row_stop)
    row = int(np.prod(shape[1:], dtype=np.int64))
    words = raw_words(("normal", seed, role, name), row_start * row, (row_stop - row_start) * row)
    halves = ((words >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    normals = torch.special.ndtri(torch.from_numpy(halves)).numpy()
    return (normals * std).reshape(row_stop - row_start, *shape[1:])
