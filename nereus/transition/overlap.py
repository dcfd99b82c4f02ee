"""How many elements two ranks of two layouts have in common: the layout function in closed form, for prices.

The price of a transition needs sums over thousands of ranks; walking their slices one by one would take seconds.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

from nereus.layout import Layout, partition, stages_of
from nereus.model.spec import ModelSpec, TensorInfo, tensors


@lru_cache(maxsize=4096)
def common_elements(spec: ModelSpec, source: Layout, target: Layout) -> np.ndarray:
    """Return int64 [source.size, target.size]: elements of the model that a source and a target rank both hold.

    Rank = stage * tp + tp_rank. All layers are equal, so it is (layers in common) x (elements of a layer in common),
    plus the tensors before and after the layers.
    """
    layers = _common_units(spec.layers, source.pp, target.pp)
    layer = [info for info in tensors(spec).values() if info.place == 0]
    total = np.kron(layers, sum(_common_of_tensor(info, source.tp, target.tp) for info in layer))
    for info in tensors(spec).values():
        if not isinstance(info.place, int):
            where = np.zeros((source.pp, target.pp), dtype=np.int64)
            where[np.ix_(stages_of(spec, source, info), stages_of(spec, target, info))] = 1
            total = total + np.kron(where, _common_of_tensor(info, source.tp, target.tp))
    total.setflags(write=False)
    return total


def held_elements(spec: ModelSpec, layout: Layout) -> np.ndarray:
    """Return int64 [layout.size]: the elements that each rank holds."""
    return common_elements(spec, Layout(1, 1), layout)[0]


def _common_of_tensor(info: TensorInfo, source_tp: int, target_tp: int) -> np.ndarray:
    """Return int64 [source_tp, target_tp]: elements of one tensor that two tp ranks have in common."""
    elements = int(np.prod(info.shape))
    if info.split is None:
        return np.full((source_tp, target_tp), elements, dtype=np.int64)
    return _common_units(info.split.num_units, source_tp, target_tp) * (elements // info.split.num_units)


def _common_units(num_units: int, source_parts: int, target_parts: int) -> np.ndarray:
    """Return int64 [source_parts, target_parts]: units that two parts of two partitions have in common."""
    common = np.zeros((source_parts, target_parts), dtype=np.int64)
    pairs = itertools.product(
        enumerate(partition(num_units, source_parts)), enumerate(partition(num_units, target_parts))
    )
    for (i, (start, stop)), (j, (other_start, other_stop)) in pairs:
        common[i, j] = max(0, min(stop, other_stop) - max(start, other_start))
    return common
