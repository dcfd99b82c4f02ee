"""Bounds on the inference stage: how short it can get with so much memory left, and how long it takes for each pair."""

from __future__ import annotations

import numpy as np

from nereus.planner.pairs import Pairs
from nereus.planner.setting import Floats
from nereus.planner.space import Ints
from nereus.planner.tables import Levels, StageTable


class InferenceBounds:
    """Bounds for one list of inference pairs.

    `least_s` [levels + 1] is what they add at least on the first device when so much is left for them and the phases.
    """

    def __init__(self, pairs: Pairs, levels: Levels, num_devices: int) -> None:
        self._pairs = pairs
        first, second = pairs.first_table, pairs.second_table
        serial = _least(first, second, levels, side=False)
        self.least_s = serial
        if pairs.side.any():
            self.least_s = np.minimum(serial, _least(first, second, levels, side=True))

    def makespan_s(self, training: Pairs, level: Ints) -> Floats:
        """Return [n] seconds of the inference stage after one training pair, if rooms have these levels [n].

        Old log-probs, values, first and second of the pair start in this order, each as soon as those before it that
        share a device with it have ended.
        """
        pairs = self._pairs
        actor = training.first_s("inference", level[None])[0]
        critic = training.second_s("inference", level[None])[0]
        actor_end, beside = int(training.first_devices[0]), bool(training.side[0])
        critic_start = int(training.second_start[0])
        critic_end = critic_start + int(training.second_devices[0])
        ends_actor = actor
        ends_critic = critic + (0.0 if beside else ends_actor)
        first = pairs.first_table.seconds["inference"][pairs.first, level]
        after_critic = pairs.first_devices > critic_start
        ends_first = np.maximum(ends_actor, np.where(after_critic, ends_critic, 0.0)) + first
        start, end = pairs.second_start, pairs.second_start + pairs.second_devices
        begins = np.where(start < actor_end, ends_actor, 0.0)
        begins = np.maximum(begins, np.where((start < critic_end) & (end > critic_start), ends_critic, 0.0))
        begins = np.maximum(begins, np.where(pairs.side, 0.0, ends_first))
        ends_second = begins + pairs.second_s("inference", level)
        return np.maximum(np.maximum(ends_actor, ends_critic), np.maximum(ends_first, ends_second))


def _least(first: StageTable, second: StageTable, levels: Levels, *, side: bool) -> Floats:
    """Return [levels + 1] the least seconds on the first device over all layouts, by bytes left."""
    one, one_resident = _by_layout(first)
    two, two_resident = _by_layout(second)
    if side:
        two, two_resident = np.zeros((1, levels.num + 1)), np.zeros(1, np.int64)
    resident = one_resident[:, None] + two_resident
    level = levels.of(levels.most[:, None, None] - resident)
    seconds = one[np.arange(len(one))[:, None], level] + two[np.arange(len(two)), level]
    return np.append(seconds.reshape(levels.num, -1).min(axis=1), np.inf)


def _by_layout(table: StageTable) -> tuple[Floats, Ints]:
    """Return [layouts, levels + 1] least seconds of inference over dp, and [layouts] bytes that stay."""
    layouts, first = np.unique(table.rows.layout, return_index=True)
    seconds = np.array([table.seconds["inference"][table.rows.layout == layout].min(axis=0) for layout in layouts])
    return seconds, table.resident[first]
