"""What a device holds of a job: tensors by unit, and the units in force that are formed over them.

tensors (pool) + model + links = a unit in force. Tensors may be there before their unit is in force, and outlive it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nereus.emu import Emu
from nereus.layout import Layout
from nereus.model.decoder import DecoderShard
from nereus.plan import role_of, stage_of
from nereus.runtime.links import Links
from nereus.runtime.rank_state import Counters, StagedUnit
from nereus.runtime.training import TrainingUnit
from nereus.runtime.transition_orders import BuildOrder, UnitKey
from nereus.runtime.unit_tensors import HeldTensors, held_dtype
from nereus.runtime.worker import WorkerContext
from nereus.staged_state import PREFIXES
from storage.slices import TensorSlice


@dataclass
class Unit:
    """One rank of a model-stage on this device, in force."""

    key: UnitKey
    replica: int
    shard: DecoderShard
    links: Links
    training: TrainingUnit | None = None
    staged: StagedUnit | None = None
    policy_version: int | None = None

    @property
    def counters(self) -> Counters:
        if self.training is None:
            return Counters()
        return Counters(self.training.updates, self.training.skipped_in_a_row)

    def let_go(self) -> None:
        """Drop every reference to tensors, whoever still knows this unit: their memory may be needed at once."""
        for parameter in self.shard.parameters():
            parameter.data = parameter.data.new_empty(0)
        self.shard.drop_prepared()
        if self.training is not None:
            for held in (self.training.masters, self.training.optimizer.exp_avg, self.training.optimizer.exp_avg_sq):
                held.clear()
        self.staged = None


@dataclass(frozen=True)
class Dissolved:
    """What is left of a unit in force whose tensors are taken apart: with tensors again, it is formed from this."""

    order: BuildOrder
    replica: int
    links: Links
    counters: Counters
    policy_version: int | None


class Units:
    """A device's units: `pool` is what it holds, `in_force` what works on it, `orders` how that is built."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self.pool: dict[UnitKey, HeldTensors] = {}
        self.in_force: dict[str, Unit] = {}
        self.orders: dict[str, BuildOrder] = {}

    def order_of(self, model_stage: str) -> BuildOrder:
        """Return an order to build a model-stage, or another one of its role: they have the same model."""
        role = role_of(model_stage)
        return self.orders.get(model_stage) or next(o for name, o in self.orders.items() if role_of(name) == role)

    def describe(self, model_stage: str, layout: Layout, rank: int) -> HeldTensors:
        """Return the tensors of a rank, none of which is made yet."""
        order = self.order_of(model_stage)
        return HeldTensors(
            order.source.spec,
            layout,
            rank,
            trains=stage_of(model_stage) == "training",
            compute_dtype=order.dtype,
            device=self._context.torch_device,
        )

    def dtype_of(self, model_stage: str) -> torch.dtype:
        """Return the dtype of a model-stage's tensors."""
        return held_dtype(self.order_of(model_stage).dtype, trains=stage_of(model_stage) == "training")

    def find(self, unit: Emu) -> HeldTensors | None:
        """Return what this device holds of a unit."""
        return self.pool.get(UnitKey.of(unit)) if self._context.device in unit.devices else None

    def holding(self, group: str, piece: TensorSlice) -> HeldTensors:
        """Return whose tensors of a model-stage have a piece now; there may be two such units, which agree.

        Raises:
            RuntimeError: what held it was freed.
        """
        for key, held in list(self.pool.items()):  # threads beside the main one ask as well
            if key.model_stage == group and held.holds(piece):
                return held
        raise RuntimeError(f"device {self._context.device} holds {piece.name} of {group} no more")

    def form(
        self,
        order: BuildOrder,
        replica: int,
        links: Links,
        counters: Counters = Counters(),
        policy_version: int | None = None,
    ) -> Unit:
        """Put a unit in force over its tensors in the pool, none of which is copied (but see `HeldTensors.weights`)."""
        key = key_of(order, replica)
        held = self.pool[key]
        shard = DecoderShard(
            held.spec,
            held.layout,
            held.rank,
            group=links.tp,
            dtype=order.dtype,
            device=self._context.torch_device,
            tensors=held.weights(),
        )
        unit = Unit(key, replica, shard, links)
        if stage_of(order.model_stage) == "training":
            assert order.optimizer is not None and order.loss is not None
            masters, exp_avg, exp_avg_sq = (held.tensors[prefix] for prefix in PREFIXES)
            unit.training = TrainingUnit(
                shard, links, order.optimizer, order.loss, masters=masters, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq
            )
            unit.training.optimizer.updates = counters.updates
            unit.training.skipped_in_a_row = counters.skipped_in_a_row
            unit.staged = StagedUnit(shard, unit.training, held)
        else:
            shard.requires_grad_(False)
        if order.model_stage == "actor.generation":
            unit.policy_version = policy_version
        self.in_force[order.model_stage] = unit
        self.orders[order.model_stage] = order
        return unit

    def dissolve(self, key: UnitKey) -> Dissolved | None:
        """Take the unit in force off its tensors, if there is one; its links stay open."""
        unit = self.in_force.get(key.model_stage)
        if unit is None or unit.key != key:
            return None
        del self.in_force[key.model_stage]
        order, counters = self.orders[key.model_stage], unit.counters
        unit.let_go()
        return Dissolved(order, unit.replica, unit.links, counters, unit.policy_version)

    def forget_orders(self) -> None:
        """Drop the orders of model-stages that have no unit in force here."""
        for name in set(self.orders) - set(self.in_force):
            del self.orders[name]

    def clear(self) -> None:
        """Let go of everything; the next job's models may be others."""
        for unit in self.in_force.values():
            unit.links.close()
            unit.let_go()
        self.in_force.clear()
        self.pool.clear()
        self.orders.clear()


def key_of(order: BuildOrder, replica: int) -> UnitKey:
    """Return the key of a replica that an order builds."""
    plan = order.plan
    return UnitKey(order.model_stage, plan.layout, plan.replicas[replica])
