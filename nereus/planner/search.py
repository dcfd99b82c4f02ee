"""The search over the plan space: the fastest plans under shared memory and the devices of each stage.

A device's memory is what stays on it of all model-stages, and room for the phase that runs. Once the residents are
known the room is, and with it everyone's best micro-batch: so times are tables over levels of room, and what is left
is to choose layouts and dp. That goes stage by stage, best first, with a lower bound for the stages not chosen yet:
pairs for training (one after the other on one block, or side by side), then generation, then pairs for inference.
The bounds look at the first device only, on which nearly every block begins; `fit` has the last word.

Source of the scheme: branch and bound over a dynamic program, Morin and Marsten 1976, Operations Research 24(4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from nereus.layout import Layout
from nereus.planner.bounds import InferenceBounds
from nereus.planner.fit import Fitted, Fitter, Place
from nereus.planner.pairs import Pairs, build_pairs
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
        order, work = setting.order, setting.workload
        trains = "actor.training" in layouts or "critic.training" in layouts
        kept = work.staging_buffer_bytes if trains else 0
        self.levels = Levels(int(order.usable_bytes[0]) - kept, int(order.usable_bytes.max()))
        self.generation = self._table("actor.generation", layouts, ("generation",), second=False)
        actor = self._table("actor.training", layouts, ("inference", "training"), second=False)
        critic = self._table("critic.training", layouts, ("inference", "training"), second=True)
        names = setting.names_of("inference")
        first = self._table(names[0] if names else "", layouts, ("inference",), second=False)
        second = self._table(names[1] if len(names) > 1 else "", layouts, ("inference",), second=True)
        self.training = build_pairs(actor, critic, len(order))
        self.inference = build_pairs(first, second, len(order))
        self.bounds = InferenceBounds(self.inference, self.levels, len(order))
        self.sync = SyncSeconds(setting, actor.rows, self.generation.rows)
        self.fitter = Fitter(setting)

    def _table(
        self, name: str, layouts: Mapping[str, tuple[Layout, ...]], phases: tuple[str, ...], *, second: bool
    ) -> StageTable:
        if name not in layouts:
            return StageTable.absent(phases, self.levels)
        rows = rows_for(name, layouts[name], len(self.setting.order), self.setting.workload)
        return build_table(name, rows, self.setting, self.levels, may_lie_anywhere=second)


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
        others = self.generation.resident.min() + space.inference.resident.min()
        level = space.levels.of(space.levels.usable_bytes - pairs.resident - others)
        left = space.levels.of(space.levels.usable_bytes - pairs.resident)
        before = self._generation_by_left()[left] + pairs.early_s(level) + space.bounds.least_s[left]
        staging = space.setting.staging_s[self._nodes(pairs)]
        return pairs.late_s(level) + np.maximum(before, staging)

    def _generation_by_left(self) -> Floats:
        """Return [levels + 1] the least seconds of generation when so much is left for it and for inference."""
        space, table = self.space, self.generation
        room = space.levels.most[:, None] - table.resident - space.inference.resident.min()
        seconds = table.seconds["generation"][np.arange(len(table)), space.levels.of(room)]
        return np.append(seconds.min(axis=1), np.inf)

    def _nodes(self, pairs: Pairs) -> Ints:
        used = pairs.num_devices
        node = self.space.setting.order.node
        return np.where(used > 0, node[np.maximum(used, 1) - 1] + 1, 0)

    def _expand(self, chunk: Ints) -> None:
        """Add the training pairs of a chunk with every generation to the open ones."""
        space, pairs = self.space, self.training.take(chunk)
        resident = pairs.resident[:, None] + self.generation.resident
        left = space.levels.of(space.levels.usable_bytes - resident)
        level = space.levels.of(space.levels.usable_bytes - resident - space.inference.resident.min())
        generation = self.generation.seconds["generation"][np.arange(len(self.generation)), level]
        before = generation + pairs.early_s(level) + space.bounds.least_s[left]
        staging = space.setting.staging_s[self._nodes(pairs)][:, None]
        sync = space.sync.of(pairs.first)
        bound = pairs.late_s(level) + np.maximum(before, staging) + sync
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
        places = self.training.places(x)
        if space.generation.name:
            places = {space.generation.name: _place(space.generation, g), **places}
        sync_s = float(space.sync.of(self.training.first[[x]])[0, g])
        alone = space.fitter.fit(places, sync_s)
        if alone is None or alone.total_s >= self.found.limit_s:
            return
        bounds, candidates = self._inference_bounds(x, g, sync_s)
        best: Fitted | None = None
        refused = _Refused(space.inference)
        for bound, index in zip(bounds.tolist(), candidates.tolist(), strict=True):
            if bound >= (self.found.limit_s if best is None else min(best.total_s, self.found.limit_s)):
                break
            if refused.covers(index):
                continue
            whole = {**places, **space.inference.places(index)}
            fitted = space.fitter.fit(whole, sync_s)
            if fitted is None:
                refused.add(index)
            elif best is None or fitted.total_s < best.total_s:
                best = fitted
        if best is not None and best.total_s < self.found.limit_s:
            self.found.add(best)

    def _inference_bounds(self, x: int, g: int, sync_s: float) -> tuple[Floats, Ints]:
        """Return lower bounds of the step with each inference pair, ascending, and the pairs' indices."""
        space, pairs = self.space, self.space.inference
        training = self.training.take(np.array([x]))
        resident = training.resident[0] + self.generation.resident[g] + pairs.resident
        level = space.levels.of(space.levels.usable_bytes - resident)
        generation = self.generation.seconds["generation"][g, level]
        inference = self.space.bounds.makespan_s(training, level)
        staging = space.setting.staging_s[self._nodes(training)][0]
        bound = training.late_s(level[None])[0] + np.maximum(generation + inference, staging) + sync_s
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


def _place(table: StageTable, row: int) -> Place:
    rows = table.rows
    layout = rows.layouts[int(rows.layout[row])]
    return Place(layout, int(rows.dp[row]), np.arange(int(rows.devices[row])))
