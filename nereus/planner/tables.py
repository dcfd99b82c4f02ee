"""Options of one model-stage as tables: bytes that stay, and seconds by how much room its phases have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.cost.options import Options
from nereus.layout import Layout
from nereus.plan import stage_of
from nereus.planner.rank_arrays import MemoryFormulas, rank_types, take_ranks
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import DeviceOrder, Ints, Rows, micro_batch_steps

Flags = NDArray[np.bool_]
# From rows with micro-batches [rows, v] and recomputation [v] to options [rows, v] where they lie, and slowdowns.
Placing = Callable[[DeviceOrder, Rows, Ints, Flags, Setting], tuple[Options, Floats]]

# Levels of room that are told apart; more make the bounds tighter and the tables larger. Generation, whose number of
# slots may be any, is worked out for one level in so many.
NUM_LEVELS = 128
GENERATION_LEVELS = 2
# Slots are told apart by this share.
_FINE = 0.02
_NO, _NO_YES = np.array([False]), np.array([False, True])


@dataclass(frozen=True)
class Levels:
    """Room on a device in equal steps: level l is from `l * step` to `(l + 1) * step` bytes.

    `usable_bytes` is what all model-stages may take of the first device, `top_bytes` of any.
    """

    usable_bytes: int
    top_bytes: int
    num: int = NUM_LEVELS

    @cached_property
    def step(self) -> int:
        return max(1, -(-self.top_bytes // self.num))

    @cached_property
    def most(self) -> Ints:
        """The most room of each level in bytes."""
        return np.minimum((np.arange(self.num) + 1) * self.step, max(0, self.top_bytes))

    def of(self, room: Ints) -> Ints:
        """Return the levels of some rooms; a negative room has level -1."""
        return np.where(room < 0, -1, np.minimum(room // self.step, self.num - 1))


@dataclass(frozen=True)
class Choices:
    """All micro-batches, each without and in training with recomputation, [rows, v]: bytes of rank 0's hungriest phase,
    and seconds by phase; "both" is the sum of a training model-stage's phases."""

    need: Ints
    seconds: Mapping[str, Floats]

    @cached_property
    def by_need(self) -> tuple[Ints, dict[str, Floats]]:
        """Needs ascending [rows, v], and the least seconds up to each [rows, v + 1]; the first is infinite, of none."""
        rows = np.arange(len(self.need))[:, None]
        order = np.argsort(self.need, axis=1, kind="stable")
        none = np.full((len(rows), 1), np.inf)
        least = {
            phase: np.minimum.accumulate(np.hstack([none, seconds[rows, order]]), axis=1)
            for phase, seconds in self.seconds.items()
        }
        return self.need[rows, order], least

    def least_s(self, row: Ints, room: Ints) -> dict[str, Floats]:
        """Return the least seconds by phase of the choices that fit rooms in bytes; rows and rooms broadcast."""
        need, least = self.by_need
        fitting = (need[row] <= room[..., None]).sum(axis=-1)
        return {phase: seconds[row, fitting] for phase, seconds in least.items()}


@dataclass(frozen=True)
class StageTable:
    """Options of one model-stage whose block begins at the first device.

    `resident` [rows] is what rank 0 holds always, `resident_low` what any rank does at least, in bytes.
    `seconds[phase]` [rows, levels + 1] are of the fastest choice that fits rank 0 with the most room of a level, or
    infinite; the last column (index -1) is infinite. `anywhere[phase]` are at most those on any block of the cluster.
    `choices` are what they are made of; generation, whose choices are its numbers of slots, has none.
    """

    name: str
    rows: Rows
    resident: Ints
    resident_low: Ints
    seconds: Mapping[str, Floats]
    anywhere: Mapping[str, Floats]
    choices: Choices | None = None

    @classmethod
    def absent(cls, phases: tuple[str, ...], levels: Levels) -> StageTable:
        """Return the table of a model-stage that this job hasn't: no devices, no bytes, no time."""
        nothing = np.zeros(1, dtype=np.int64)
        zeros = {phase: np.zeros((1, levels.num + 1)) for phase in phases}
        rows = Rows((), nothing, nothing)
        rows.__dict__.update(tp=nothing, pp=nothing, size=nothing, devices=nothing)
        return cls("", rows, nothing, nothing, zeros, zeros)

    def __len__(self) -> int:
        return len(self.resident)

    @cached_property
    def row_of(self) -> dict[tuple[Layout, int], int]:
        """The row of each layout and dp."""
        layouts = [self.rows.layouts[index] for index in self.rows.layout.tolist()]
        return {key: row for row, key in enumerate(zip(layouts, self.rows.dp.tolist(), strict=True))}


def build_table(name: str, rows: Rows, setting: Setting, levels: Levels, *, may_lie_anywhere: bool) -> StageTable:
    """Return the table of a model-stage for some rows."""
    formulas = MemoryFormulas(setting.workload, setting.job.precision)
    types = rank_types(setting.job.specs[name], rows.layouts)
    stage = stage_of(name)
    held = formulas.resident(stage, types.ranks)
    lowest = np.array([held[of_rank].min() for of_rank in types.of_rank])
    residents = held[types.first][rows.layout], lowest[rows.layout]
    if stage == "generation":
        seconds = _generation_seconds(name, rows, setting, levels, front_options)
        return StageTable(name, rows, *residents, seconds, seconds)
    choices = _choices(name, rows, setting, front_options)
    seconds = anywhere = _by_level(choices, levels)
    if may_lie_anywhere and not _is_regular(setting.order, rows, setting):
        anywhere = _by_level(_choices(name, rows, setting, best_options), levels)
    return StageTable(name, rows, *residents, seconds, anywhere, choices)


def _choices(name: str, rows: Rows, setting: Setting, place: Placing) -> Choices:
    stage, work = stage_of(name), setting.workload
    samples = work.minibatch_samples if stage == "training" else work.samples_per_step
    share = np.maximum(1, -(-samples // rows.dp))
    steps = micro_batch_steps(share, rows.pp, setting.job.most_micro_batch)
    recompute = _NO_YES if stage == "training" else _NO
    micro_batch = np.repeat(steps, len(recompute), axis=1)
    flags = np.tile(recompute, steps.shape[1])
    formulas, types = MemoryFormulas(work, setting.job.precision), rank_types(setting.job.specs[name], rows.layouts)
    ranks = take_ranks(types.ranks, types.first[rows.layout][:, None])
    need = formulas.phase(stage, ranks, share[:, None], micro_batch, flags, rows.dp[:, None])
    options, slowdown = place(setting.order, rows, micro_batch, flags, setting)
    if stage == "inference":
        seconds = setting.phase_seconds(name, stage, options, slowdown)
        return Choices(need, {stage: seconds})
    late_s = setting.phase_seconds(name, "training", options, slowdown)
    # Old log-probs and values are computed without a backward pass, so recomputation changes nothing.
    options, slowdown = place(setting.order, rows, steps, np.zeros(steps.shape[1], bool), setting)
    early_s = setting.phase_seconds(name, "inference", options, slowdown)
    early_s = np.repeat(early_s, len(recompute), axis=1)
    return Choices(need, {"inference": early_s, "training": late_s, "both": early_s + late_s})


def _by_level(choices: Choices, levels: Levels) -> dict[str, Floats]:
    """Return by phase [rows, levels + 1] the least seconds of the choices that fit the most room of each level."""
    num_rows, width = len(choices.need), levels.num + 1
    lowest = np.searchsorted(levels.most, choices.need)  # the first level whose most room is enough
    lowest += np.arange(num_rows)[:, None] * width
    fitting = np.bincount(lowest.reshape(-1), minlength=num_rows * width).reshape(num_rows, width)
    fitting = np.cumsum(fitting, axis=1)
    fitting[:, -1] = 0  # the level of a negative room
    rows = np.arange(num_rows)[:, None]
    return {phase: seconds[rows, fitting] for phase, seconds in choices.by_need[1].items()}


def _generation_seconds(name: str, rows: Rows, setting: Setting, levels: Levels, place: Placing) -> dict[str, Floats]:
    """Return [rows, levels + 1] seconds of generation with as many slots as each level of room holds."""
    work = setting.workload
    share = np.maximum(1, -(-work.samples_per_step // rows.dp))
    room = levels.most[GENERATION_LEVELS - 1 :: GENERATION_LEVELS]
    slots = np.minimum(_most_slots(name, rows, setting, room)[rows.layout], share[:, None])
    # Most levels hold all of a small share: each number of slots is priced once for each row.
    new = np.diff(slots, axis=1, prepend=-1) != 0
    row = np.nonzero(new)[0]
    options, slowdown = place(setting.order, rows.take(row), np.maximum(1, slots[new])[:, None], _NO, setting)
    seconds = setting.phase_seconds(name, "generation", options, slowdown)[:, 0]
    by_level = np.where(slots > 0, seconds[np.cumsum(new).reshape(new.shape) - 1], np.inf)
    result = np.full((len(rows), levels.num + 1), np.inf)
    result[:, : levels.num] = np.repeat(by_level, GENERATION_LEVELS, axis=1)
    return {"generation": result}


def _most_slots(name: str, rows: Rows, setting: Setting, room: Ints) -> Ints:
    """Return [layouts, rooms] slots of a replica that rank 0 has room for: at least the most, and hardly more."""
    formulas = MemoryFormulas(setting.workload, setting.job.precision)
    types = rank_types(setting.job.specs[name], rows.layouts)
    ranks = take_ranks(types.ranks, types.first[:, None])
    most = setting.workload.samples_per_step
    # All numbers up to 1 / _FINE, then in steps of that share.
    ratio = np.geomspace(1.0, most, int(np.log(most) / np.log1p(_FINE)) + 2)
    tried = np.union1d(np.arange(1, min(most, int(1 / _FINE)) + 1), np.ceil(ratio).astype(np.int64).clip(max=most))
    need = formulas.phase("generation", ranks, most, tried)
    fitting = np.stack([np.searchsorted(each, room, side="right") for each in need])
    # The next number tried doesn't fit: one less is as many as may.
    return np.append(tried, most + 1)[fitting] - 1


def front_options(
    order: DeviceOrder, rows: Rows, micro_batch: Ints, recompute: Flags, setting: Setting
) -> tuple[Options, Floats]:
    """Return options [rows, v] on blocks from the first device on, and their slowdowns."""
    borders = np.array([order.crossings(0, layout) for layout in rows.layouts])[rows.layout]
    used = rows.devices
    nodes = order.node[used - 1] - order.node[0] + 1
    slowdown = np.maximum.accumulate(order.slowdown)[used - 1]
    return _options(rows, micro_batch, recompute, used > borders[:, 0], used > borders[:, 1], nodes, slowdown)


def best_options(
    order: DeviceOrder, rows: Rows, micro_batch: Ints, recompute: Flags, setting: Setting
) -> tuple[Options, Floats]:
    """Return options [rows, v] that cross nodes only where no block can help it, on the fastest devices."""
    per_node = setting.cluster.kind.devices
    nodes = -(-rows.devices // per_node)
    slowdown = np.full(len(rows), order.slowdown.min())
    return _options(rows, micro_batch, recompute, rows.tp > per_node, rows.size > per_node, nodes, slowdown)


def _options(
    rows: Rows,
    micro_batch: Ints,
    recompute: Flags,
    tp_across: Flags,
    pp_across: Flags,
    nodes: Ints,
    slowdown: Floats,
) -> tuple[Options, Floats]:
    """Return options that broadcast: what rows differ in as columns [rows, 1], so that it is worked out once a row."""

    def column(array: NDArray, dtype: type = np.float64) -> NDArray:
        return array.astype(dtype)[:, None]

    options = Options(
        dp=column(rows.dp),
        tp=column(rows.tp),
        pp=column(rows.pp),
        micro_batch=micro_batch.astype(np.float64),
        recompute=recompute[None, :],
        tp_across=column(tp_across, bool),
        pp_across=column(pp_across & (rows.pp > 1), bool),
        nodes=column(nodes),
    )
    return options, slowdown[:, None]


def _is_regular(order: DeviceOrder, rows: Rows, setting: Setting) -> bool:
    """Return whether a block from the first device on is as good as any."""
    one = np.ones((len(rows), 1), dtype=np.int64)
    front, at_front = front_options(order, rows, one, np.zeros(1, bool), setting)
    best, at_best = best_options(order, rows, one, np.zeros(1, bool), setting)
    same = [(getattr(front, name) == getattr(best, name)).all() for name in ("tp_across", "pp_across", "nodes")]
    return all(same) and bool((at_front == at_best).all())
