"""What staged state is made of: the grid of each tensor, who writes which pieces of it, and what a rank reads.

Pure: shapes in, slices out. A piece is the unit of writing, reading and checksums; its boundaries are those of every tp
that the model allows, so that ranks of any layout read whole pieces and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from nereus.layout import Layout, partition, slices_of, stages_of
from nereus.limits import SHARD_BYTES
from nereus.model.spec import ModelSpec, TensorInfo, tensors
from nereus.plan import Plan
from storage.slices import TensorSlice

# The model-stages whose state can't be had from elsewhere: each is one group of tensors.
STAGED = ("actor.training", "critic.training")
# A parameter goes by its own name, the optimizer's moments by this and its name.
PREFIXES = ("", "exp_avg/", "exp_avg_sq/")
# Work is given out in runs of pieces of about this share of a shard, so that loads come out even.
_RUNS_PER_SHARD = 8


@dataclass(frozen=True)
class ShardOrder:
    """One shard file that one device writes: pieces of one group, adjacent ones of a tensor side by side."""

    group: str
    device: int
    file: str
    pieces: tuple[TensorSlice, ...]
    num_bytes: int


@dataclass(frozen=True)
class _Run:
    """Adjacent pieces of one tensor that the same devices hold."""

    group: str
    holders: tuple[int, ...]
    pieces: tuple[TensorSlice, ...]
    num_bytes: int


@lru_cache(maxsize=65536)
def grid(info: TensorInfo, most_tp: int) -> tuple[TensorSlice, ...]:
    """Return the pieces of a tensor, in order: cut, along the dimension that tp splits, where any tp <= most_tp cuts.

    A tensor that tp doesn't split is one piece.
    """
    if info.split is None:
        return (TensorSlice(info.name, (0,) * len(info.shape), info.shape),)
    dim, unit = info.split.dim, info.split.unit_size
    bounds = sorted({stop for tp in range(1, most_tp + 1) for _, stop in partition(info.split.num_units, tp)} - {0})
    pieces, start = [], 0
    for stop in bounds:
        starts = tuple(start * unit if d == dim else 0 for d in range(len(info.shape)))
        sizes = tuple((stop - start) * unit if d == dim else n for d, n in enumerate(info.shape))
        pieces.append(TensorSlice(info.name, starts, sizes))
        start = stop
    return tuple(pieces)


def staged_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the whole tensors of a group by their names in staged state: parameters and both moments of each."""
    return {prefix + info.name: info.shape for prefix in PREFIXES for info in tensors(spec).values()}


def base_name(name: str) -> str:
    """Return the parameter's name of a tensor of staged state: `w` of `exp_avg/w`."""
    return name.removeprefix("exp_avg/").removeprefix("exp_avg_sq/")


def wanted_slices(spec: ModelSpec, layout: Layout, rank: int) -> tuple[TensorSlice, ...]:
    """Return what a rank reads of its group: the slices that it holds, of parameters and moments; no empty ones."""
    held = [part for part in slices_of(spec, layout, rank) if part.num_elements]
    return tuple(replace(part, name=prefix + part.name) for prefix in PREFIXES for part in held)


def plan_shards(
    plan: Plan, specs: Mapping[str, ModelSpec], *, element_bytes: int, max_shard_bytes: int = SHARD_BYTES
) -> dict[int, tuple[ShardOrder, ...]]:
    """Return what each device writes: over all devices each piece of all groups exactly once.

    All ranks and replicas that hold a piece may write it. What only few hold is given out first, then the largest
    first, to the device that has least to write so far (ties: the lowest). Deterministic.

    Args:
        element_bytes: of every staged tensor (8 in float64 runs, else 4).
        max_shard_bytes: most bytes of a shard; a single piece that is larger is a shard of its own.
    """
    runs = [
        run
        for group in STAGED
        if group in plan
        for run in _runs(group, plan, specs[group], element_bytes, max_shard_bytes // _RUNS_PER_SHARD)
    ]
    loads = dict.fromkeys(plan.devices, 0)
    mine: dict[int, list[_Run]] = {device: [] for device in loads}
    for run in sorted(runs, key=lambda run: (len(run.holders), -run.num_bytes)):  # stable: then in model order
        device = min(run.holders, key=lambda holder: (loads[holder], holder))
        loads[device] += run.num_bytes
        mine[device].append(run)
    position = {id(run): index for index, run in enumerate(runs)}
    return {
        device: _pack(device, sorted(given, key=lambda run: position[id(run)]), max_shard_bytes)
        for device, given in mine.items()
        if given
    }


def _runs(group: str, plan: Plan, spec: ModelSpec, element_bytes: int, most_bytes: int) -> Iterator[_Run]:
    """Yield the pieces of a group, together as many as lie side by side, have the same holders and aren't too large."""
    layout, replicas = plan[group].layout, plan[group].replicas
    for prefix in PREFIXES:
        for info in tensors(spec).values():
            stages = stages_of(spec, layout, info)
            held: list[TensorSlice] = []
            last_rank = -1
            for piece in grid(info, spec.kv_heads):
                tp_rank = _tp_rank_of(info, piece, layout.tp)
                size = sum(p.num_elements for p in held) + piece.num_elements
                if held and (tp_rank != last_rank or size * element_bytes > most_bytes):
                    yield _run(group, replicas, layout, stages, last_rank, held, prefix, element_bytes)
                    held = []
                held.append(piece)
                last_rank = tp_rank
            yield _run(group, replicas, layout, stages, last_rank, held, prefix, element_bytes)


def _run(
    group: str,
    replicas: tuple[tuple[int, ...], ...],
    layout: Layout,
    stages: tuple[int, ...],
    tp_rank: int,
    pieces: list[TensorSlice],
    prefix: str,
    element_bytes: int,
) -> _Run:
    tp_ranks = range(layout.tp) if tp_rank < 0 else (tp_rank,)
    holders = {devices[stage * layout.tp + t] for devices in replicas for stage in stages for t in tp_ranks}
    named = tuple(replace(piece, name=prefix + piece.name) for piece in pieces)
    return _Run(group, tuple(sorted(holders)), named, sum(p.num_elements for p in pieces) * element_bytes)


def _tp_rank_of(info: TensorInfo, piece: TensorSlice, tp: int) -> int:
    """Return the tp rank that holds a piece, or -1 where all do."""
    if info.split is None:
        return -1
    unit = piece.starts[info.split.dim] // info.split.unit_size
    return next(rank for rank, (start, stop) in enumerate(partition(info.split.num_units, tp)) if start <= unit < stop)


def _pack(device: int, runs: list[_Run], most_bytes: int) -> tuple[ShardOrder, ...]:
    """Fill shards with runs in order; a shard holds one group."""
    shards: list[list[_Run]] = []
    size = 0
    for run in runs:
        if not shards or shards[-1][0].group != run.group or size + run.num_bytes > most_bytes:
            shards.append([])
            size = 0
        shards[-1].append(run)
        size += run.num_bytes
    orders = []
    for number, shard in enumerate(shards):
        group, pieces = shard[0].group, tuple(piece for run in shard for piece in run.pieces)
        file = f"{group}-{device:05d}-{number:05d}.safetensors"
        orders.append(ShardOrder(group, device, file, pieces, sum(run.num_bytes for run in shard)))
    return tuple(orders)
