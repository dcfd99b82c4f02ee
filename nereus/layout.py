"""Which rank holds which slice of which tensor: the one pure function that runtime, storage and planner share.

Ranks of a layout are numbered stage by stage: rank = stage * tp + tp_rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from nereus.model.spec import ModelSpec, TensorInfo, tensors
from storage.slices import TensorSlice


@dataclass(frozen=True, order=True)
class Layout:
    """Tensor-parallel and pipeline-parallel degree inside one replica."""

    tp: int = 1
    pp: int = 1

    @property
    def size(self) -> int:
        """Ranks of one replica."""
        return self.tp * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.tp

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp


@dataclass(frozen=True)
class Holding:
    """A slice, the ranks of the layout that hold it, and the one among them that answers for it (writes, norms)."""

    slice: TensorSlice
    holders: tuple[int, ...]
    owner: int


@dataclass(frozen=True)
class Copy:
    """One slice that travels from a source device to a target device (equal when it is already there)."""

    source: int
    target: int
    slice: TensorSlice


def partition(num_units: int, num_parts: int) -> tuple[tuple[int, int], ...]:
    """Return `num_parts` consecutive (start, stop) ranges; the first ones are longer by one where it doesn't divide."""
    base, extra = divmod(num_units, num_parts)
    bounds = [0]
    for part in range(num_parts):
        bounds.append(bounds[-1] + base + (part < extra))
    return tuple(itertools.pairwise(bounds))


def check_layout(spec: ModelSpec, layout: Layout) -> None:
    """Raise ValueError when the model can't be cut this way."""
    if layout.tp < 1 or layout.pp < 1:
        raise ValueError(f"tp={layout.tp} pp={layout.pp} is no layout; both must be at least 1.")
    if layout.tp > spec.kv_heads:
        raise ValueError(
            f"tp={layout.tp} is more than the model's {spec.kv_heads} KV heads; choose tp <= {spec.kv_heads}."
        )
    if layout.pp > spec.layers:
        raise ValueError(f"pp={layout.pp} is more than the model's {spec.layers} layers; choose pp <= {spec.layers}.")


def stage_layers(spec: ModelSpec, layout: Layout, stage: int) -> range:
    """Return the layers of a pipeline stage; earlier stages take the odd ones, the last also has the head."""
    return range(*partition(spec.layers, layout.pp)[stage])


def stages_of(spec: ModelSpec, layout: Layout, info: TensorInfo) -> tuple[int, ...]:
    """Return the pipeline stages that hold a tensor (two for a tied embedding), the owning one first."""
    last = layout.pp - 1
    if info.place == "embed":
        return (0, last) if spec.ties_head and last else (0,)
    if not isinstance(info.place, int):
        return (last,)
    for stage, (start, stop) in enumerate(partition(spec.layers, layout.pp)):
        if start <= info.place < stop:
            return (stage,)
    raise AssertionError(info)


def tensor_slices(info: TensorInfo, tp: int) -> tuple[TensorSlice, ...]:
    """Return the slices of a tensor by tp rank; one slice, the whole, for a tensor that TP doesn't cut."""
    if info.split is None:
        return (TensorSlice(info.name, (0,) * len(info.shape), info.shape),)
    dim, unit = info.split.dim, info.split.unit_size
    parts = []
    for start, stop in partition(info.split.num_units, tp):
        starts = tuple(start * unit if d == dim else 0 for d in range(len(info.shape)))
        sizes = tuple((stop - start) * unit if d == dim else n for d, n in enumerate(info.shape))
        parts.append(TensorSlice(info.name, starts, sizes))
    return tuple(parts)


@lru_cache(maxsize=4096)
def slices_of(spec: ModelSpec, layout: Layout, rank: int) -> tuple[TensorSlice, ...]:
    """Return the slices that a rank holds, in model order."""
    stage, tp_rank = layout.stage(rank), layout.tp_rank(rank)
    held = []
    for info in tensors(spec).values():
        if stage in stages_of(spec, layout, info):
            parts = tensor_slices(info, layout.tp)
            held.append(parts[tp_rank if info.split else 0])
    return tuple(held)


@lru_cache(maxsize=256)
def holdings(spec: ModelSpec, layout: Layout) -> tuple[Holding, ...]:
    """Return every slice of the model under a layout, with its holders (ascending) and its owner.

    The slices of one tensor are disjoint and cover it. The owner of a replicated slice rotates over its holders, so
    that what owners do (writing, summing norms) is balanced.
    """
    result = []
    for index, info in enumerate(tensors(spec).values()):
        stages = stages_of(spec, layout, info)
        for tp_rank, part in enumerate(tensor_slices(info, layout.tp)):
            if info.split is None:
                holders = tuple(sorted(s * layout.tp + t for s in stages for t in range(layout.tp)))
                owner = stages[0] * layout.tp + index % layout.tp
            else:
                holders = tuple(sorted(s * layout.tp + tp_rank for s in stages))
                owner = stages[0] * layout.tp + tp_rank
            result.append(Holding(part, holders, owner))
    return tuple(result)


@lru_cache(maxsize=4096)
def owned_slices(spec: ModelSpec, layout: Layout, rank: int) -> frozenset[TensorSlice]:
    """Return the slices that a rank answers for: over all ranks of a replica each element once."""
    return frozenset(h.slice for h in holdings(spec, layout) if h.owner == rank)


def plan_copies(
    spec: ModelSpec,
    source_layout: Layout,
    sources: Sequence[Sequence[int]],
    target_layout: Layout,
    targets: Sequence[Sequence[int]],
    *,
    element_bytes: int = 1,
) -> list[Copy]:
    """Return the copies that fill target replicas from source replicas of the same model.

    Args:
        sources, targets: per replica its devices in rank order.
        element_bytes: weight of an element when the load of the senders is balanced.

    Every target rank gets each slice of its layout exactly once, cut where the source layout cuts. A piece that the
    target device already holds comes from itself; else the holder that has sent least so far sends it (ties: lowest
    device), so the load spreads over replicas. Deterministic.
    """
    pieces: dict[str, list[Holding]] = {}
    for holding in holdings(spec, source_layout):
        pieces.setdefault(holding.slice.name, []).append(holding)
    sent: dict[int, int] = {}
    copies = []
    for devices in targets:
        for rank, target in enumerate(devices):
            for wanted in slices_of(spec, target_layout, rank):
                for holding in pieces[wanted.name]:
                    part = wanted.intersect(holding.slice)
                    if part is None:
                        continue
                    candidates = {replica[holder] for replica in sources for holder in holding.holders}
                    source = target if target in candidates else min(candidates, key=lambda d: (sent.get(d, 0), d))
                    if source != target:
                        sent[source] = sent.get(source, 0) + part.num_elements * element_bytes
                    copies.append(Copy(source, target, part))
    return copies
