"""The weight sync between stages: whether its buffers fit, and its seconds, for placed plans and for many at once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from nereus.cost.activations import COMPUTE_BYTES
from nereus.cost.memory import SYNC_BUCKETS_IN_FLIGHT
from nereus.cost.moves import weight_sync_operations
from nereus.cost.rates import Rates
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.spec import ModelSpec, num_parameters
from nereus.plan import StagePlan
from nereus.planner.place import Place, in_place
from nereus.planner.rank_arrays import rank_types
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import DeviceOrder, Ints, Rows


def sync_fits(places: Mapping[str, Place], room: Ints, setting: Setting) -> bool:
    """Return whether buffers of the weight sync, and the least that any device needs to work, fit.

    Args:
        room: bytes by position beside what is resident.
    """
    work = setting.workload
    source, target = places.get("actor.training"), places.get("actor.generation")
    covered = np.zeros(len(room), dtype=bool)
    for place in places.values():
        covered[place.positions] = True
    least = int(room[covered].min()) - work.workspace_bytes
    if source is None or target is None or in_place(source, target) or least < 0:
        return least >= 0
    most = work.most_sync_peers or len(room)
    peers = min(len(target.positions), most) + min(len(source.positions), most)
    if peers * SYNC_BUCKETS_IN_FLIGHT * SYNC_BUCKET_BYTES <= least:
        return True
    need = np.full(len(room), work.workspace_bytes)
    for name, place, other in (("actor.training", source, target), ("actor.generation", target, source)):
        others = len(other.positions) - other.mask(len(room))[place.positions]
        need[place.positions] += np.minimum(others, most) * np.tile(_message_bytes(name, place, setting), place.dp)
    return bool((need <= room)[covered].all())


def _message_bytes(name: str, place: Place, setting: Setting) -> Ints:
    """Return by rank the bytes of the messages that it has under way with one peer in one direction."""
    types = rank_types(setting.job.specs[name], (place.layout,))
    held = types.ranks.parameters * COMPUTE_BYTES[setting.job.precision]
    return np.minimum(held, SYNC_BUCKETS_IN_FLIGHT * SYNC_BUCKET_BYTES)[types.of_rank[0]]


def placed_sync_s(places: Mapping[str, Place], setting: Setting) -> float:
    """Return the seconds of the weight sync of a placed plan; 0 without training or generation."""
    if "actor.training" not in places or "actor.generation" not in places:
        return 0.0
    ids = np.array(setting.order.ids)
    training, generation = (
        StagePlan(place.dp, place.layout, tuple(ids[place.positions].tolist()), 1)
        for place in (places["actor.training"], places["actor.generation"])
    )
    rates = Rates(setting.cluster.kind, setting.job.precision)
    sync = weight_sync_operations(setting.job.specs["actor.training"], training, generation, setting.cluster, rates)
    return float(sync.total_s(setting.efficiencies))


@lru_cache(maxsize=64)
def _parameters(spec: ModelSpec) -> int:
    return num_parameters(spec)


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
        whole = _parameters(setting.job.specs["actor.training"]) * rates.element_bytes
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
