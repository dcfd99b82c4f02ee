"""Lower bounds of a step's stages when only some model-stages are chosen, from rooms on the first devices of blocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nereus.planner.pairs import Pairs
from nereus.planner.setting import Floats
from nereus.planner.tables import Levels, StageTable

# Inference pairs are grouped by the bytes that stay of them into so many classes.
NUM_CLASSES = 8


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
        self.least_s = least_by_left(pairs.first_table, "inference", levels)

    def least(self, seconds: Floats) -> Floats:
        """Return [n, classes] the least of [n, pairs] in each class."""
        return np.stack([seconds[:, members].min(axis=1) for members in self._of_class], axis=1)


def least_by_left(table: StageTable, phase: str, levels: Levels, others: int = 0) -> Floats:
    """Return [levels + 1] the least seconds of any row, by the bytes that are left for it and its phases.

    Args:
        others: bytes of what is left that others hold at least.
    """
    layouts, begin = np.unique(table.rows.layout, return_index=True)  # rows are ordered by layout
    seconds = np.minimum.reduceat(table.seconds[phase], begin, axis=0)
    room = levels.most[:, None] - table.resident[begin] - others
    return np.append(seconds[np.arange(len(layouts)), levels.of(room)].min(axis=1), np.inf)


def inference_s(
    training: Pairs, pairs: Pairs, actor_s: Floats, critic_s: Floats, first_s: Floats, second_s: Floats
) -> Floats:
    """Return the seconds of the inference stage for training pairs and inference pairs; all broadcast.

    Old log-probs (`actor_s`), values (`critic_s`), and the first and second of the pair start in this order, each as
    soon as those before it that share a device with it have ended.
    """
    critic_end_s = critic_s + np.where(training.side, 0.0, actor_s)
    after_critic = pairs.first_devices > training.second_start
    first_end_s = np.maximum(actor_s, np.where(after_critic, critic_end_s, 0.0)) + first_s
    begins_s = np.where(pairs.second_start < training.first_devices, actor_s, 0.0)
    begins_s = np.maximum(begins_s, np.where(meets_critic(training, pairs), critic_end_s, 0.0))
    begins_s = np.maximum(begins_s, np.where(pairs.side, 0.0, first_end_s))
    return np.maximum(np.maximum(actor_s, critic_end_s), np.maximum(first_end_s, begins_s + second_s))


def meets_critic(training: Pairs, pairs: Pairs) -> NDArray[np.bool_]:
    """Return whether the second of an inference pair shares a device with the second training model-stage."""
    return (pairs.second_start < training.second_end) & (pairs.second_end > training.second_start)
