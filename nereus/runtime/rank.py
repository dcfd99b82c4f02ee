"""What a worker holds and does: its ranks of all model-stages, and one method for each command of the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nereus.layout import owned_slices
from nereus.model.export import ExportPlan, write_slices
from nereus.model.kv_cache import KvCache
from nereus.plan import StagePlan, stage_of
from nereus.ppo.learning_rate import LearningRate
from nereus.runtime.generation import Request, Response, Sampling, generate
from nereus.runtime.inference import InferenceWork, infer_logprobs, infer_scores, infer_values
from nereus.runtime.links import connect_links
from nereus.runtime.probe_compute import ComputeOrder, ComputeSpeeds, probe_compute
from nereus.runtime.probe_work import ProbeOrder, ProbeResult, probe
from nereus.runtime.rank_state import Counters, Restored, ShardWorks
from nereus.runtime.rank_transition import RankTransition, SyncLink
from nereus.runtime.shard_feeds import FeedEnd
from nereus.runtime.training import TrainingStats, TrainingWork
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder, TransitionOrder, UnitKey
from nereus.runtime.units import Unit, Units, key_of
from nereus.runtime.weight_sync import SliceStore, connect_weight_sync
from nereus.runtime.worker import WorkerContext
from nereus.staged_state import ShardOrder
from nereus.transition.primitives import Primitive
from storage.manifest import ShardRecord


@dataclass(frozen=True)
class GenerationWork:
    """One replica's share of a step's rollouts; refused when the weights are of another policy version."""

    requests: tuple[Request, ...]
    sampling: Sampling
    policy_version: int
    num_slots: int
    max_tokens: int


class Rank:
    """The service of one worker."""

    # What torch imports when a pipeline stage gets its gradient from the next one: 0.5 s and 30 MB of each worker, or
    # once for all of them, before they are forked.
    PRELOADED = ("torch.fx.experimental.symbolic_shapes",)

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.held = Units(context)
        self._transition = RankTransition(context, self.held)
        self._sync: SyncLink | None = None
        self.shards = ShardWorks((), self.held.holding)

    @property
    def units(self) -> dict[str, Unit]:
        """The units in force, by model-stage."""
        return self.held.in_force

    def build(self, order: BuildOrder) -> None:
        """Connect, allocate and load this device's rank of a model-stage."""
        replica, links = connect_links(self.context, order.model_stage, order.plan, order.epoch)
        self.held.orders[order.model_stage] = order
        held = self.held.describe(order.model_stage, order.plan.layout, links.rank)
        held.make()
        # The first weight sync fills actor.generation; what isn't from the source is restored right after this.
        if order.model_stage != "actor.generation" and (order.from_source or stage_of(order.model_stage) != "training"):
            with contextlib.closing(order.source.open()) as source:
                held.fill(source)
        else:
            held.zero_moments()
        self.held.pool[key_of(order, replica)] = held
        self.held.form(order, replica, links)

    def connect_sync(self, epoch: int, training: StagePlan, generation: StagePlan) -> None:
        """Connect the devices that exchange the actor's weights and settle what each sends."""
        order = self.held.order_of("actor.training")
        self._replace_sync(connect_weight_sync(self.context, order, epoch, training, generation))

    def _replace_sync(self, sync: SyncLink | None) -> None:
        if self._sync is not None:
            self._sync[1].close()
        self._sync = sync

    @torch.no_grad()
    def sync_weights(self, policy_version: int) -> int:
        """Fill actor.generation from actor.training; return the bytes that this device received."""
        assert self._sync is not None
        sync, communicator = self._sync
        training, generation = self.units.get("actor.training"), self.units.get("actor.generation")
        if training is not None and training.training is not None and training.training.updates != policy_version:
            raise RuntimeError(
                f"actor.training is at policy version {training.training.updates}, not {policy_version}; "
                "the weights were not sent."
            )
        sync.run(_parameters(training), _parameters(generation), communicator)
        if generation is not None:
            generation.policy_version = policy_version
        return sync.received_bytes

    def generate(self, work: GenerationWork) -> list[Response] | None:
        """Return the replica's responses (on its rank 0). KV cache and packed weights live for this call only."""
        unit = self.units["actor.generation"]
        if unit.policy_version != work.policy_version:
            raise RuntimeError(
                f"actor.generation holds policy version {unit.policy_version}, but {work.policy_version} was "
                "asked for; sync the weights first."
            )
        shard = unit.shard
        cache = KvCache(
            shard.spec,
            shard.layout,
            shard.rank,
            num_slots=work.num_slots,
            max_tokens=work.max_tokens,
            dtype=shard.dtype,
            device=self.context.torch_device,
        )
        shard.prepare_decode()
        try:
            responses = generate(
                shard, work.requests, work.sampling, cache=cache, replica=unit.links.replica, tp=unit.links.tp
            )
        finally:
            shard.drop_prepared()
        unit.links.release_slots()
        return responses if unit.links.rank == 0 else None

    def infer_logprobs(self, model_stage: str, work: InferenceWork, temperature: float) -> list[np.ndarray]:
        return self._infer(infer_logprobs, model_stage, work, temperature)

    def infer_values(self, model_stage: str, work: InferenceWork) -> list[np.ndarray]:
        return self._infer(infer_values, model_stage, work)

    def infer_scores(self, model_stage: str, work: InferenceWork) -> list[np.ndarray]:
        return self._infer(infer_scores, model_stage, work)

    def _infer(
        self, infer: Callable[..., list[np.ndarray]], model_stage: str, work: InferenceWork, *more: float
    ) -> list[np.ndarray]:
        unit = self.units[model_stage]
        result = infer(unit.shard, unit.links, work, *more)
        unit.links.release_slots()
        return result

    def train(self, model_stage: str, work: TrainingWork, learning_rate: LearningRate) -> TrainingStats:
        """Run all updates of a step of actor.training or critic.training."""
        unit = self.units[model_stage]
        assert unit.training is not None
        stats = unit.training.train(work, learning_rate)
        unit.links.replica.trim()
        unit.links.release_slots()
        return stats

    def probe(self, order: ProbeOrder) -> ProbeResult:
        """Measure how fast this device moves bytes."""
        return probe(order, self.context)

    def probe_compute(self, order: ComputeOrder) -> ComputeSpeeds:
        """Measure how fast this device computes."""
        return probe_compute(order, self.context)

    # Staged state

    def restore(self, model_stage: str, folder: str, shards: Sequence[ShardRecord], counters: Counters) -> Restored:
        """Read this rank's parameters, moments and counters from a committed set."""
        staged = self.units[model_stage].staged
        assert staged is not None
        with torch.no_grad():
            return staged.restore(model_stage, folder, shards, counters)

    def hold_shards(self, orders: Sequence[ShardOrder]) -> None:
        """Take the orders of all shards that this device writes for each commit."""
        self.shards = ShardWorks(orders, self.held.holding)

    def write_shard(self, folder: str, file: str) -> ShardRecord:
        """Write one shard of a set, beside the commands of a step."""
        return self.shards.write(folder, file)

    def preserve_shards(self, files: Sequence[str]) -> None:
        """Copy what is unwritten, right before the first update that would change it."""
        self.shards.preserve(files)

    def drop_shard_copies(self) -> None:
        """Free the copies of a commit that was given up."""
        self.shards.drop_copies()

    # Transitions

    def begin_transition(self, order: TransitionOrder) -> None:
        """Connect what the new plan needs."""
        self._transition.begin(order)

    def run_primitive(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        """Do this device's part of a primitive; return the bytes received or read."""
        return self._transition.run(primitive, restore)

    def feed_shard(self, feed: str, item: ShardRecord | FeedEnd) -> None:
        """Tell a `restore` of another shard of its set; beside the other commands, so in no order."""
        self._transition.feeds.put(feed, item)

    def drop_primitive(self, primitive: Primitive) -> None:
        """Let go of what a failed primitive was making."""
        self._transition.drop(primitive)

    def sum_up(self, keys: Sequence[UnitKey]) -> dict[UnitKey, dict[str, int]]:
        """Return the checksums of what this device holds of some units."""
        return self._transition.sum_up(keys)

    def commit_transition(self, epoch: int, counters: Mapping[str, Counters], policy_version: int) -> None:
        """Put the new plan's units in force."""
        sync = self._transition.commit(counters, policy_version)
        if sync is not None:
            self._replace_sync(sync)

    def end_transition(self, epoch: int) -> None:
        """Close what belonged to the old plan."""
        self._transition.end()
        if {"actor.training", "actor.generation"}.isdisjoint(self.units):
            self._replace_sync(None)

    def undo_transition(self, epoch: int) -> None:
        """Put the old plan's units in force again."""
        self._transition.undo()

    # The run's end

    def write_export(self, model_stage: str, plan: ExportPlan) -> int:
        """Write the slices that this rank owns (first replica only) into an export; return the bytes written."""
        unit = self.units[model_stage]
        assert unit.training is not None
        if unit.replica != 0:
            return 0
        owned = owned_slices(unit.shard.spec, unit.shard.layout, unit.shard.rank)
        masters = unit.training.masters
        return write_slices(
            plan, ((v.slice, v.of(masters[v.parameter])) for v in unit.shard.views() if v.slice in owned)
        )

    def release(self) -> None:
        """Drop all model-stages and their communicators; the worker lives on."""
        self._transition.release()
        self.held.clear()
        self.shards = ShardWorks((), self.held.holding)
        self._replace_sync(None)

    def read_parameters(self, model_stage: str) -> list[tuple[Sequence[int], str, np.ndarray]]:
        """Return this rank's owned master slices as (starts, name, array); for tests and tools, never on a hot path."""
        unit = self.units[model_stage]
        owned = owned_slices(unit.shard.spec, unit.shard.layout, unit.shard.rank)
        tensors = unit.training.masters if unit.training else dict(unit.shard.named_parameters())
        return [
            (v.slice.starts, v.slice.name, v.of(tensors[v.parameter]).detach().double().cpu().numpy())
            for v in unit.shard.views()
            if v.slice in owned
        ]

    def begin_memory(self) -> int:
        """Begin to measure what a step needs; return what of the worker's cap is mapped before it."""
        self.context.reset_peak_memory()
        return self.context.mapped_bytes()

    def read_memory(self) -> tuple[int, int]:
        """Return the peak bytes since the measurement began, and what of its cap is mapped; begin to measure anew.

        See `WorkerContext.peak_memory_bytes`, which is above the worker's baseline, and `WorkerContext.mapped_bytes`.
        """
        peak = self.context.peak_memory_bytes()
        return peak, self.begin_memory()


def _parameters(unit: Unit | None) -> SliceStore | None:
    """Return a unit's weights of forward passes by slices."""
    return None if unit is None else SliceStore(unit.shard.views(), dict(unit.shard.named_parameters()))
