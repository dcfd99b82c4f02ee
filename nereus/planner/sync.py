"""Seconds of the weight sync for many pairs of training and generation at once, both from the first device on."""

from __future__ import annotations

import numpy as np

from nereus.cost.rates import Rates
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.spec import num_parameters
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import DeviceOrder, Ints, Rows


class SyncSeconds:
    """The formulas of `nereus.cost.moves.weight_sync_operations` on arrays, for blocks from the first device on."""

    def __init__(self, setting: Setting, training: Rows, generation: Rows) -> None:
        self._setting, self._training, self._generation = setting, training, generation
        self._none = "actor.training" not in setting.names or "actor.generation" not in setting.names
        if self._none:
            return
        order = setting.order
        self._whole_copies = _nodes_with_whole_copies(order, training)
        self._sources = order.node[training.devices - 1] + 1
        self._targets = order.node[generation.devices - 1] + 1

    def of(self, training: Ints) -> Floats:
        """Return [n, generations] seconds for some rows of training."""
        if self._none:
            return np.zeros((len(training), len(self._generation)))
        setting, source, target = self._setting, self._training.take(training), self._generation
        rates = Rates(setting.cluster.kind, setting.job.precision)
        whole = num_parameters(setting.job.specs["actor.training"]) * rates.element_bytes
        total = whole * target.dp
        per_device = np.maximum(whole / target.size, total / source.devices[:, None])
        work = per_device * rates.intra_byte_s
        per_node = total / np.minimum(self._targets, self._sources[training][:, None])
        travels = self._targets > self._whole_copies[training][:, None]
        work = np.where(travels, np.maximum(work, per_node * rates.inter_byte_s), work)
        speed = setting.efficiencies
        messages = np.ceil(per_device / SYNC_BUCKET_BYTES)
        seconds = messages * speed.latency_s["weight_sync"] + work / speed.efficiency["weight_sync"]
        same = (source.tp[:, None] == target.tp) & (source.pp[:, None] == target.pp)
        return np.where(same & (target.dp <= source.dp[:, None]), 0.0, seconds)


def _nodes_with_whole_copies(order: DeviceOrder, rows: Rows) -> Ints:
    """Return for each row how many nodes from the first on hold a whole replica each."""
    begins = np.flatnonzero(np.diff(order.node, prepend=-1))
    ends = np.append(begins[1:], len(order))
    result = np.zeros(len(rows), dtype=np.int64)
    for size in np.unique(rows.size):
        last = -(-begins // size) * size + size  # where the first replica that begins on the node ends
        inside = last <= ends
        alike = rows.size == size
        whole = np.where(inside, last, 1 << 40)[None, :] <= rows.devices[alike][:, None]
        result[alike] = np.where(whole.all(axis=1), len(begins), whole.argmin(axis=1))
    return result
