"""The search over the plan space: the fastest plans under shared memory and the devices of each stage.

A device's memory is what stays on it of all model-stages, and room for the phase that runs. Once the residents are
known the room is, and with it everyone's best micro-batch: so times are tables over levels of room, and what is left
is to choose layouts and dp. That goes stage by stage, best first, with a lower bound for the stages not chosen yet:
pairs for training (one after the other on one block, or side by side), then generation, then pairs for inference.
The bounds look at the first device of each block only; `fit` has the last word.

Source of the scheme: branch and bound over a dynamic program, Morin and Marsten 1976, Operations Research 24(4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nereus.layout import Layout
from nereus.planner.bounds import InferenceClasses, inference_s
from nereus.planner.fit import Fitted, Fitter
from nereus.planner.pairs import Pairs, inference_pairs, place_row, training_pairs
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import Ints, rows_for
from nereus.planner.sync import SyncSeconds
from nereus.planner.tables import Levels, StageTable, build_table

# Training pairs that are expanded at a time.
_CHUNK = 16


@dataclass
class Found:
    """The fastest plans so far, at most `count`, fastest first."""

    count: int
    plans: list[Fitted] = field(default_factory=list)

    @property
    def limit_s(self) -> float:
        """What a plan must be faster than to be kept."""
        return self.plans[-1].total_s if len(self.plans) == self.count else np.inf

    def add(self, fitted: Fitted) -> None:
        self.plans.append(fitted)
        self.plans.sort(key=lambda each: each.total_s)
        del self.plans[self.count :]


class PlanSpace:
    """Everything the search looks things up in: tables, pairs and bounds of one setting."""

    def __init__(self, setting: Setting, layouts: Mapping[str, tuple[Layout, ...]]) -> None:
        self.setting = setting
        order = setting.order
        trains = "actor.training" in layouts or "critic.training" in layouts
        self.staging_buffer = setting.workload.staging_buffer_bytes if trains else 0
        self.levels = Levels(int(order.usable_bytes[0]) - self.staging_buffer, int(order.usable_bytes.max()))
        self._layouts = layouts
        self.generation = self._table("actor.generation", ("generation",), second=False)
        actor = self._table("actor.training", ("inference", "training", "both"), second=False)
        critic = self._table("critic.training", ("inference", "training", "both"), second=True)
        names = setting.names_of("inference")
        first = self._table(names[0] if names else "", ("inference",), second=False)
        second = self._table(names[1] if len(names) > 1 else "", ("inference",), second=True)
        self.training = training_pairs(actor, critic, len(order))
        self.inference = inference_pairs(first, second, len(order))
        self.classes = InferenceClasses(self.inference, self.levels)
        self.sync = SyncSeconds(setting, actor.rows, self.generation.rows)
        self.fitter = Fitter(setting)

    def _table(self, name: str, phases: tuple[str, ...], *, second: bool) -> StageTable:
        if name not in self._layouts:
            return StageTable.absent(phases, self.levels)
        rows = rows_for(name, self._layouts[name], len(self.setting.order), self.setting.workload)
        return build_table(name, rows, self.setting, self.levels, may_lie_anywhere=second)

    def level(self, resident: Ints) -> Ints:
        """Return the level of room on the first device beside some bytes."""
        return self.levels.of(self.levels.usable_bytes - resident)

    def critic_level(self, training: Pairs, resident: Ints | int) -> Ints:
        """Return the level of room on the critic's first device beside it and some bytes, where it lies aside."""
        return self.levels.of(self.levels.top_bytes - self.staging_buffer - training.second_resident - resident)

    def staging_s(self, training: Pairs) -> Floats:
        used = training.num_devices
        nodes = np.where(used > 0, self.setting.order.node[np.maximum(used, 1) - 1] + 1, 0)
        return self.setting.staging_s[nodes]

    def inference_s(self, training: Pairs, generation: Ints | None) -> tuple[Floats, Floats]:
        """Return [n, pairs] bounds on the inference stage, and on what the pairs add to it on the first device.

        Args:
            generation: [n, 1] rows of generation, or None where it is open: then the least that any leaves resident.
        """
        pairs, table = self.inference, self.generation
        held = table.resident.min() if generation is None else table.resident[generation]
        level = self.level(training.resident + held + pairs.resident)
        at_second = training.resident_at(pairs.second_start) + pairs.second_resident
        at_critic = pairs.resident_at(training.second_start)
        if generation is not None:
            end, low = table.rows.devices[generation], table.resident_low[generation]
            at_second = at_second + np.where(end > pairs.second_start, low, 0)
            at_critic = at_critic + np.where(end > training.second_start, low, 0)
        second_level = self.levels.of(self.levels.top_bytes - at_second)
        stage_s = inference_s(training, pairs, level, self.critic_level(training, at_critic), second_level)
        return stage_s, pairs.serial_s("inference", level)


def find_plans(setting: Setting, layouts: Mapping[str, tuple[Layout, ...]], count: int) -> list[Fitted]:
    """Return the fastest plans with some layouts, fastest first; no two are alike in training and in generation.

    Args:
        layouts: per model-stage those to choose from.
    """
    if any(not each for each in layouts.values()):
        return []
    return _Search(PlanSpace(setting, layouts), Found(count)).run()


class _Search:
    def __init__(self, space: PlanSpace, found: Found) -> None:
        self.space, self.found = space, found
        self.training, self.generation = space.training, space.generation
        # Training pairs with a generation, not completed yet: bounds ascending, and indices.
        self._open: tuple[Floats, Ints, Ints] = (np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))

    def run(self) -> list[Fitted]:
        bounds = self._training_bounds()
        order = np.argsort(bounds, kind="stable")
        order = order[np.isfinite(bounds[order])]
        for start in range(0, len(order) + _CHUNK, _CHUNK):
            chunk = order[start : start + _CHUNK]
            least = bounds[chunk[0]] if len(chunk) else np.inf
            self._complete_below(least)
            if least >= self.found.limit_s:
                break
            self._expand(chunk)
        return self.found.plans

    def _training_bounds(self) -> Floats:
        """Return a lower bound of the step's seconds for each training pair, whatever the other stages are."""
        space, pairs = self.space, self.training
        level = space.level(pairs.resident + self.generation.resident.min() + space.inference.resident.min())
        critic_level = space.critic_level(pairs, 0)
        left = space.level(pairs.resident)
        others = self._generation_by_left()[left] + space.classes.least_s[left]
        before = others + pairs.serial_s("inference", level)
        bound = pairs.late_s(level, critic_level) + np.maximum(before, space.staging_s(pairs))
        return np.maximum(bound, others + pairs.serial_s("both", level))

    def _generation_by_left(self) -> Floats:
        """Return [levels + 1] the least seconds of generation when so much is left for it and for inference."""
        space, table = self.space, self.generation
        room = space.levels.most[:, None] - table.resident - space.inference.resident.min()
        seconds = table.seconds["generation"][np.arange(len(table)), space.levels.of(room)]
        return np.append(seconds.min(axis=1), np.inf)

    def _expand(self, chunk: Ints) -> None:
        """Add the training pairs of a chunk with every generation to the open ones."""
        space, table, pairs = self.space, self.generation, self.training.take(chunk)
        column = pairs.along_rows
        stage_s, own_s = space.inference_s(column, None)
        inference, own = space.classes.least(stage_s), space.classes.least(own_s)  # [chunk, classes]
        rows = np.arange(len(table))
        beside = np.where(table.rows.devices > column.second_start, table.resident_low, 0)
        critic_level = space.critic_level(column, beside)
        sync, staging = space.sync.of(pairs.first), space.staging_s(column)
        bound = np.full((len(chunk), len(table)), np.inf)
        for index, resident in enumerate(space.classes.resident.tolist()):
            level = space.level(column.resident + table.resident + resident)
            generation = table.seconds["generation"][rows, level]
            late = column.late_s(level, critic_level)
            whole = late + np.maximum(generation + inference[:, [index]], staging)
            alone = column.serial_s("both", level) + generation + own[:, [index]]
            bound = np.minimum(bound, np.maximum(whole, alone))
        bound = bound + sync
        x, g = np.nonzero(bound < self.found.limit_s)
        old = self._open
        merged = np.concatenate([old[0], bound[x, g]])
        keep = np.flatnonzero(merged < self.found.limit_s)
        keep = keep[np.argsort(merged[keep], kind="stable")]
        self._open = (
            merged[keep],
            np.concatenate([old[1], chunk[x]])[keep],
            np.concatenate([old[2], g])[keep],
        )

    def _complete_below(self, least_s: float) -> None:
        """Complete the open ones whose bound is below that of all that aren't expanded yet."""
        bounds, pairs, generations = self._open
        done = 0
        while done < len(bounds) and bounds[done] <= least_s and bounds[done] < self.found.limit_s:
            self._complete(int(pairs[done]), int(generations[done]))
            done += 1
        self._open = bounds[done:], pairs[done:], generations[done:]

    def _complete(self, x: int, g: int) -> None:
        """Find the best inference for one training pair and one generation, and keep the plan if it is good enough."""
        space = self.space
        sync_s = float(space.sync.of(self.training.first[[x]])[0, g])
        bounds, candidates = self._inference_bounds(x, g, sync_s)
        if not len(bounds):
            return
        places = self.training.places(x)
        if space.generation.name:
            places = {space.generation.name: place_row(space.generation, g, 0), **places}
        alone = space.fitter.fit(places, sync_s)
        if alone is None or alone.total_s >= self.found.limit_s:
            return
        best: Fitted | None = None
        refused = _Refused(space.inference)
        for bound, index in zip(bounds.tolist(), candidates.tolist(), strict=True):
            if bound >= (self.found.limit_s if best is None else min(best.total_s, self.found.limit_s)):
                break
            if refused.covers(index):
                continue
            fitted = space.fitter.fit({**places, **space.inference.places(index)}, sync_s)
            if fitted is None:
                refused.add(index)
            elif best is None or fitted.total_s < best.total_s:
                best = fitted
        if best is not None and best.total_s < self.found.limit_s:
            self.found.add(best)

    def _inference_bounds(self, x: int, g: int, sync_s: float) -> tuple[Floats, Ints]:
        """Return lower bounds of the step with each inference pair, ascending, and the pairs' indices."""
        space, pairs, table = self.space, self.space.inference, self.generation
        training, generation = self.training.take(np.array([x])), np.array([g])
        level = space.level(training.resident + table.resident[g] + pairs.resident)
        beside = np.where(table.rows.devices[g] > training.second_start, table.resident_low[g], 0)
        late = training.late_s(level, space.critic_level(training, beside + pairs.resident_at(training.second_start)))
        stage_s, own_s = space.inference_s(training, generation)
        generation_s = table.seconds["generation"][g, level]
        bound = late + np.maximum(generation_s + stage_s, space.staging_s(training))
        bound = np.maximum(bound, training.serial_s("both", level) + generation_s + own_s) + sync_s
        kept = np.flatnonzero(bound < self.found.limit_s)
        kept = kept[np.argsort(bound[kept], kind="stable")]
        return bound[kept], kept


class _Refused:
    """Inference pairs that don't fit: then those with the same layouts on more devices at the same place don't."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._known: list[tuple[int, int, bool, int, int]] = []

    def _describe(self, index: int) -> tuple[int, int, bool, int, int]:
        pairs = self._pairs
        first, second = int(pairs.first[index]), int(pairs.second[index])
        one, two = pairs.first_table.rows, pairs.second_table.rows
        return (
            int(one.layout[first]),
            int(two.layout[second]),
            bool(pairs.side[index]),
            int(one.devices[first]),
            int(two.devices[second]),
        )

    def add(self, index: int) -> None:
        self._known.append(self._describe(index))

    def covers(self, index: int) -> bool:
        first, second, side, one, two = self._describe(index)
        return any(
            (first, second, side) == known[:3] and two >= known[4] and (one == known[3] if side else one >= known[3])
            for known in self._known
        )
