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

import numpy as np

from nereus.layout import Layout
from nereus.planner.bounds import inference_s, least_by_left, meets_critic
from nereus.planner.fit import Fitted
from nereus.planner.found import Found, Refused
from nereus.planner.pairs import Pairs, place_row
from nereus.planner.plan_space import PlanSpace
from nereus.planner.rooms import Rooms
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import EVERY_DEGREE_UP_TO, Ints

# Training pairs that are expanded at a time: few at first, to have a plan to measure the others by.
_FIRST_CHUNK = 4
_CHUNK = 64
# Plans that are bounded at a time once training and generation are chosen.
_BATCH = 4096
# On more than 16 devices a plan that is faster by less than this share isn't looked for: there are too many alike.
SLACK = 1e-3


def find_plans(
    setting: Setting, layouts: Mapping[str, tuple[Layout, ...]], count: int, *, by_layouts: bool = False
) -> list[Fitted]:
    """Return the fastest plans with some layouts, fastest first; no two are alike in training and in generation.

    Args:
        layouts: per model-stage those to choose from.
        by_layouts: of plans with the same layouts in training and generation return only the fastest.
    """
    most = len(setting.order)
    layouts = {name: tuple(layout for layout in each if layout.size <= most) for name, each in layouts.items()}
    if any(not each for each in layouts.values()):
        return []
    slack = 0.0 if len(setting.order) <= EVERY_DEGREE_UP_TO else SLACK
    return _Search(PlanSpace(setting, layouts), Found(count, slack, by_layouts)).run()


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
        start, size = 0, _FIRST_CHUNK
        while start < len(order):
            chunk = order[start : start + size]
            self._complete_below(float(bounds[chunk[0]]))
            if bounds[chunk[0]] >= self.found.limit_s:
                break
            self._expand(chunk[bounds[chunk] < self.found.limit_s])
            if not self.found.plans and len(self._open[0]):
                # The most promising one so far, whatever may come: a limit spares most of what does.
                self._complete_below(float(self._open[0][0]))
            start, size = start + size, _CHUNK
        self._complete_below(np.inf)
        return self.found.plans

    def _training_bounds(self) -> Floats:
        """Return a lower bound of the step's seconds for each training pair, whatever the other stages are."""
        space, pairs = self.space, self.training
        level = space.level(pairs.resident + self.generation.resident.min() + space.inference.resident.min())
        critic_level = space.critic_level(pairs, 0)
        left = space.level(pairs.resident)
        least = int(space.inference.resident.min())
        generation_s = least_by_left(self.generation, "generation", space.levels, least)
        others = generation_s[left] + space.classes.least_s[left]
        before = others + pairs.serial_s("inference", level)
        bound = pairs.late_s(level, critic_level) + np.maximum(before, space.staging_s(pairs))
        return np.maximum(bound, others + pairs.serial_s("both", level))

    def _expand(self, chunk: Ints) -> None:
        """Add the training pairs of a chunk with every generation that may be good enough to the open ones."""
        pairs = self.training.take(chunk)
        sync_s = self.space.sync.of(pairs.first)
        x, g = np.nonzero(self._rough_bounds(pairs.along_rows) + sync_s < self.found.limit_s)
        if not len(x):
            return
        bound = self._fine_bounds(pairs, x, g) + sync_s[x, g]
        old = self._open
        merged = np.concatenate([old[0], bound])
        keep = np.flatnonzero(merged < self.found.limit_s)
        keep = keep[np.argsort(merged[keep], kind="stable")]
        self._open = (
            merged[keep],
            np.concatenate([old[1], chunk[x]])[keep],
            np.concatenate([old[2], g])[keep],
        )

    def _rough_bounds(self, column: Pairs) -> Floats:
        """Return [n, generations] bounds for training pairs [n, 1] with the shortest inference that memory allows."""
        space, table = self.space, self.generation
        resident = column.resident + table.resident
        level = space.level(resident + space.inference.resident.min())
        others = (
            table.seconds["generation"][np.arange(len(table)), level] + space.classes.least_s[space.level(resident)]
        )
        late = column.late_s(level, space.critic_level(column, 0))
        whole = late + np.maximum(others + column.serial_s("inference", level), space.staging_s(column))
        return np.maximum(whole, others + column.serial_s("both", level))

    def _fine_bounds(self, pairs: Pairs, x: Ints, g: Ints) -> Floats:
        """Return bounds for training pairs x with generations g, over all classes of inference pairs."""
        space, table = self.space, self.generation
        used, at = np.unique(x, return_inverse=True)
        stage_s, own_s = space.inference_s(pairs.take(used).along_rows)
        inference_s, own_s = space.classes.least(stage_s)[at], space.classes.least(own_s)[at]  # [n, classes]
        column, rows = pairs.take(x).along_rows, g[:, None]
        level = space.level(column.resident + table.resident[rows] + space.classes.resident)
        beside = np.where(table.rows.devices[rows] > column.second_start, table.resident_low[rows], 0)
        generation_s = table.seconds["generation"][rows, level]
        late = column.late_s(level, space.critic_level(column, beside))
        whole = late + np.maximum(generation_s + inference_s, space.staging_s(column))
        return np.maximum(whole, column.serial_s("both", level) + generation_s + own_s).min(axis=1)

    def _complete_below(self, least_s: float) -> None:
        """Complete the open ones whose bound is below that of all that aren't expanded yet, a few at a time."""
        while True:
            bounds, pairs, generations = self._open
            below = (bounds <= least_s) & (bounds < self.found.limit_s)
            # Without a limit one is enough to find one.
            most = max(1, _BATCH // len(self.space.inference)) if np.isfinite(self.found.limit_s) else 1
            some = np.flatnonzero(below)[:most]
            if not len(some):
                return
            self._open = np.delete(bounds, some), np.delete(pairs, some), np.delete(generations, some)
            bound = self._pair_bounds(pairs[some], generations[some])
            for x, g, each in zip(pairs[some].tolist(), generations[some].tolist(), bound, strict=True):
                self._complete(x, g, each)

    def _complete(self, x: int, g: int, bounds: Floats) -> None:
        """Find the best inference for one training pair and one generation, and keep the plan if it is good enough.

        Args:
            bounds: [pairs] on the step with each inference pair.
        """
        space = self.space
        candidates = np.flatnonzero(bounds < self.found.limit_s)
        if not len(candidates):
            return
        sync_s = float(space.sync.of(self.training.first[[x]])[0, g])
        places = self.training.places(x)
        if space.generation.name:
            places = {space.generation.name: place_row(space.generation, g, 0), **places}
        best: Fitted | None = None
        refused = Refused(space.inference)
        for index in candidates[np.argsort(bounds[candidates], kind="stable")].tolist():
            if bounds[index] >= (self.found.limit_s if best is None else min(best.work_s, self.found.limit_s)):
                break
            if refused.covers(index):
                continue
            fitted = space.fitter.fit({**places, **space.inference.places(index)}, sync_s)
            if fitted is None:
                # Where training and generation don't even fit alone, no inference pair helps.
                if refused.is_empty and space.fitter.fit(places, sync_s) is None:
                    return
                refused.add(index)
            elif best is None or fitted.work_s < best.work_s:
                best = fitted
        if best is not None and best.work_s < self.found.limit_s:
            self.found.add(best)

    def _pair_bounds(self, x: Ints, g: Ints) -> Floats:
        """Return [n, pairs] lower bounds of the step for training pairs x with generations g, with inference pairs."""
        space, pairs, rows = self.space, self.space.inference, g[:, None]
        training = self.training.take(x).along_rows
        rooms = space.rooms(training, rows)
        level = space.levels.of
        generation_s = self.generation.seconds["generation"][rows, level(rooms.generation)]
        actor, critic = self._by_room(x, rooms)
        first_s = pairs.first_s("inference", level(rooms.first))
        second_s = pairs.second_s("inference", level(rooms.second), level(rooms.second))
        stage_s = inference_s(training, pairs, actor["inference"], critic["inference"], first_s, second_s)
        one_s, two_s = actor["training"], critic["training"]
        late_s = np.where(training.side, np.maximum(one_s, two_s), one_s + two_s)
        bound = late_s + np.maximum(generation_s + stage_s, space.staging_s(training))
        # One choice serves both phases of a training model-stage, so its path through the step is as long as both.
        both_s = actor["both"] + np.where(training.side, 0.0, critic["both"])
        own_s = first_s + np.where(pairs.side, 0.0, second_s)
        bound = np.maximum(bound, generation_s + both_s + own_s)
        after_critic = np.where(pairs.first_devices > training.second_start, first_s, 0.0)
        after_critic = np.maximum(after_critic, np.where(meets_critic(training, pairs), second_s, 0.0))
        sync_s = space.sync.of(self.training.first[x])[np.arange(len(x)), g]
        return np.maximum(bound, generation_s + critic["both"] + after_critic) + sync_s[:, None]

    def _by_room(self, x: Ints, rooms: Rooms) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Return the least seconds by phase [n, pairs] of both training model-stages, by the rooms they find."""
        training = self.training.take(x)
        one, two = training.first_table, training.second_table
        nothing = dict.fromkeys(("inference", "training", "both"), np.zeros(1))
        actor = one.choices.least_s(training.first[:, None], rooms.actor) if one.choices else nothing
        if two.choices is None:
            return actor, nothing
        critic = two.choices.least_s(training.second[:, None], rooms.critic)
        for index in np.flatnonzero(training.side).tolist():
            # Beside the actor the critic may have other neighbours than at the front.
            beside = self.space.fitter.choices_beside(two.name, training.places(index)[two.name])
            if beside is not None:
                for phase, seconds in beside.least_s(np.zeros(1, np.int64), rooms.critic[index]).items():
                    critic[phase][index] = seconds
        return actor, critic
