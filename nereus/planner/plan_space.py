"""Everything the search looks things up in: tables, pairs and bounds of one setting."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nereus.layout import Layout
from nereus.plan import stage_of
from nereus.planner.bounds import InferenceClasses, inference_s
from nereus.planner.fit import Fitter
from nereus.planner.pairs import Pairs, inference_pairs, training_pairs
from nereus.planner.rooms import Blocks, Rooms, find_rooms
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import Ints, rows_for
from nereus.planner.sync import SyncSeconds
from nereus.planner.tables import Levels, StageTable, build_table


class PlanSpace:
    """Tables of all model-stages, pairs for training and for inference, and what they share.

    Attributes:
        staging_buffer: bytes that a device which trains keeps for staged state.
        classes: the inference pairs by how much stays of them.
        sync: seconds of the weight sync by training and generation.
    """

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
        self.fitter = Fitter(setting, {table.name: table for table in (actor, critic, first, second) if table.name})

    def _table(self, name: str, phases: tuple[str, ...], *, second: bool) -> StageTable:
        if name not in self._layouts:
            return StageTable.absent(phases, self.levels)
        work, num_devices = self.setting.workload, len(self.setting.order)
        rows = rows_for(stage_of(name), self._layouts[name], num_devices, work.samples_per_step, work.minibatches)
        return build_table(name, rows, self.setting, self.levels, may_lie_anywhere=second)

    def level(self, resident: Ints) -> Ints:
        """Return the level of room on the first device beside some bytes."""
        return self.levels.of(self.levels.usable_bytes - resident)

    def critic_level(self, training: Pairs, resident: Ints | int) -> Ints:
        """Return the level of room on the critic's first device beside it and some bytes, where it lies aside."""
        return self.levels.of(self.levels.top_bytes - self.staging_buffer - training.second_resident - resident)

    def rooms(self, training: Pairs, generation: Ints) -> Rooms:
        """Return the rooms [pairs] of all model-stages for one training pair and one row of generation."""
        blocks = Blocks.of(self.generation, generation, np.zeros(1, dtype=np.int64))
        front, most = self.levels.usable_bytes + self.staging_buffer, self.levels.top_bytes
        return find_rooms(training, blocks, self.inference, front_bytes=front, any_bytes=most, kept=self.staging_buffer)

    def staging_s(self, training: Pairs) -> Floats:
        used = training.num_devices
        nodes = np.where(used > 0, self.setting.order.node[np.maximum(used, 1) - 1] + 1, 0)
        return self.setting.staging_s[nodes]

    def inference_s(self, training: Pairs) -> tuple[Floats, Floats]:
        """Return [n, pairs] bounds on the inference stage of training pairs [n, 1] with the leanest generation, and on
        what each inference pair adds to it on the first device."""
        pairs = self.inference
        level = self.level(training.resident + self.generation.resident.min() + pairs.resident)
        critic_level = self.critic_level(training, pairs.resident_at(training.second_start))
        actor_s = training.first_s("inference", level)
        critic_s = training.second_s("inference", level, critic_level)
        held = training.resident_at(pairs.second_start) + pairs.second_resident
        second_s = pairs.second_s("inference", level, self.levels.of(self.levels.top_bytes - held))
        stage_s = inference_s(training, pairs, actor_s, critic_s, pairs.first_s("inference", level), second_s)
        return stage_s, pairs.serial_s("inference", level)
