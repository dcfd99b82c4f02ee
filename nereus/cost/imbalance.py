"""How unequal shares of samples are although the longest are dealt out first: all wait for the fullest one."""

from __future__ import annotations

import functools

import numpy as np

from nereus.cost.operations import Array

# Above so many samples a share the difference vanishes beside their mean.
_MOST_SAMPLES_A_SHARE = 32
_MOST_DRAWS = 1024
_DRAWN_NUMBERS = 2**16


def fullest_share_excess(samples: float | Array, shares: Array) -> Array:
    """Return by how much the fullest share exceeds so many samples of mean length, in standard deviations of a sample.

    Args:
        samples: to be shared out; a scalar or [n].
        shares: among so many, [n].
    """
    pairs = np.stack(np.broadcast_arrays(np.ceil(np.round(samples, 9)), shares)).reshape(2, -1).astype(np.int64)
    codes, places = np.unique(pairs[0] << 32 | pairs[1], return_inverse=True)
    excess = np.array([_excess(int(code >> 32), int(code & 0xFFFFFFFF)) for code in codes])
    return excess[places].reshape(np.shape(shares))


@functools.lru_cache(maxsize=4096)
def _excess(samples: int, shares: int) -> float:
    """Return the mean over draws of normal lengths, which go by turns, the longest left to the lightest share.

    Where shares can't be equal in number, one of the larger number counts as the fullest, and as no less than their
    mean. For 2 samples in 2 shares it is the mean of the larger of two numbers, 1 / sqrt(pi).
    """
    shares = min(shares, samples)
    if shares == 1 or samples > _MOST_SAMPLES_A_SHARE * shares:
        return 0.0
    draws = np.random.default_rng(0).standard_normal((min(_MOST_DRAWS, _DRAWN_NUMBERS // samples + 1), samples))
    lengths = -np.sort(-np.concatenate((draws, -draws)), axis=1)
    sums = np.zeros((len(lengths), shares))
    for start in range(0, samples, shares):
        turn = lengths[:, start : start + shares]
        lightest = np.argsort(sums, axis=1)[:, : turn.shape[1]]
        np.put_along_axis(sums, lightest, np.take_along_axis(sums, lightest, axis=1) + turn, axis=1)
    return max(0.0, float(np.take_along_axis(sums, lightest, axis=1).max(axis=1).mean()))
