"""Lower bounds of a step's stages when only some model-stages are chosen, from rooms on the first devices of blocks."""

from __future__ import annotations

import numpy as np

from nereus.planner.pairs import Pairs
from nereus.planner.setting import Floats
from nereus.planner.space import Ints
from nereus.planner.tables import Levels, StageTable

# Inference pairs are grouped by the bytes that stay of them into so many classes.
NUM_CLASSES = 16


class InferenceClasses:
    """Inference pairs grouped by what stays of them on the first device.

    `resident` [classes] is the least of each class in bytes. `least_s` [levels + 1] is what any pair adds at least on
    the first device when so much is left for it and the phases.
    """

    def __init__(self, pairs: Pairs, levels: Levels) -> None:
        self.pairs = pairs
        order = np.argsort(pairs.resident, kind="stable")
        self._of_class = np.array_split(order, min(NUM_CLASSES, len(order)))
        self.resident = pairs.resident[[members[0] for members in self._of_class]]
        self.least_s = _least(pairs.first_table, pairs.second_table, levels)

    def least(self, seconds: Floats) -> Floats:
        """Return [n, classes] the least of [n, pairs] in each class."""
        return np.stack([seconds[:, members].min(axis=1) for members in self._of_class], axis=1)


def _least(first: StageTable, second: StageTable, levels: Levels) -> Floats:
    """Return [levels + 1] least seconds of the first one, by bytes left: the second one may lie on other devices."""
    room = levels.most[:, None] - first.resident
    seconds = first.seconds["inference"][np.arange(len(first)), levels.of(room)].min(axis=1)
    if not first.name or not second.name:
        return np.append(seconds, np.inf)
    return np.append(seconds, np.inf)


def inference_s(training: Pairs, pairs: Pairs, level: Ints, critic_level: Ints, second_level: Ints) -> Floats:
    """Return the seconds of the inference stage for training pairs and inference pairs; all broadcast.

    Old log-probs, values, and the first and second of the pair start in this order, each as soon as those before it
    that share a device with it have ended.

    Args:
        level: of the room on the first device.
        critic_level, second_level: on the first device of the second training and inference model-stage, where they
            lie beside the first ones.
    """
    actor = training.first_s("inference", level)
    critic = training.second_s("inference", level, critic_level) + np.where(training.side, 0.0, actor)
    after_critic = pairs.first_devices > training.second_start
    first = np.maximum(actor, np.where(after_critic, critic, 0.0)) + pairs.first_s("inference", level)
    begins = np.where(pairs.second_start < training.first_devices, actor, 0.0)
    on_critic = (pairs.second_start < training.second_end) & (pairs.second_end > training.second_start)
    begins = np.maximum(begins, np.where(on_critic, critic, 0.0))
    begins = np.maximum(begins, np.where(pairs.side, 0.0, first))
    second = begins + pairs.second_s("inference", level, second_level)
    return np.maximum(np.maximum(actor, critic), np.maximum(first, second))
