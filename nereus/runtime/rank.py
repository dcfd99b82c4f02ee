"""What a worker holds and does: its ranks of all model-stages, and one method for each command of the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from nereus.layout import Layout, owned_slices, slices_of
from nereus.model.decoder import DecoderShard
from nereus.model.export import ExportPlan, write_slices
from nereus.model.kv_cache import KvCache
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan, role_of, stage_of
from nereus.ppo.learning_rate import LearningRate
from nereus.runtime.communicator import Communicator
from nereus.runtime.generation import Request, Response, Sampling, generate
from nereus.runtime.inference import InferenceWork, infer_logprobs, infer_scores, infer_values
from nereus.runtime.links import Links, connect_links
from nereus.runtime.probe_work import ProbeOrder, ProbeResult, probe
from nereus.runtime.rank_state import Counters, Restored, ShardWorks, StagedUnit
from nereus.runtime.rank_transition import RankTransition
from nereus.runtime.training import TrainingStats, TrainingUnit, TrainingWork
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder, TransitionOrder, UnitKey
from nereus.runtime.unit_tensors import HeldTensors
from nereus.runtime.weight_sync import SliceStore, WeightSync, sync_copies
from nereus.runtime.worker import WorkerContext
from nereus.staged_state import PREFIXES, ShardOrder
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


@dataclass
class Unit:
    """One rank of a model-stage on this device."""

    replica: int
    shard: DecoderShard
    links: Links
    key: UnitKey
    training: TrainingUnit | None = None
    staged: StagedUnit | None = None
    policy_version: int | None = None


class Rank:
    """The service of one worker."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.units: dict[str, Unit] = {}
        self._sync: tuple[WeightSync, Communicator] | None = None
        self.shards = ShardWorks((), {})
        self.orders: dict[str, BuildOrder] = {}  # by which each model-stage was last built
        self.transition = RankTransition(self)

    def build(self, order: BuildOrder) -> None:
        """Connect, allocate and load this device's rank of a model-stage."""
        replica, links = connect_links(self.context, order.model_stage, order.plan, order.epoch)
        position = replica * order.plan.layout.size
        key = UnitKey(
            order.model_stage, order.plan.layout, order.plan.devices[position : position + order.plan.layout.size]
        )
        self.orders[order.model_stage] = order
        held = self.describe(order.model_stage, order.plan.layout, links.rank)
        held.make()
        for prefix in held.tensors:
            if prefix:
                for tensor in held.tensors[prefix].values():
                    tensor.zero_()
        self.transition.pool[key] = held
        # The first weight sync fills actor.generation.
        trains = stage_of(order.model_stage) == "training"
        if order.model_stage != "actor.generation" and (order.from_source or not trains):
            with contextlib.closing(order.source.open()) as source, torch.no_grad():
                for part in slices_of(held.spec, held.layout, held.rank):
                    source.read(part, held.find(part))
        self.form(key, replica, links, Counters(), None)

    # Units over tensors that are there

    def order_of(self, model_stage: str) -> BuildOrder:
        """Return by which a model-stage was built here, or another of its role: they have one model."""
        found = self.orders.get(model_stage)
        return found or next(o for name, o in self.orders.items() if role_of(name) == role_of(model_stage))

    def spec_of(self, model_stage: str) -> ModelSpec:
        """Return the model of a model-stage that is, or sends to one that is, on this device."""
        return self.order_of(model_stage).source.spec

    def dtype_of(self, model_stage: str, trains: bool) -> torch.dtype:
        """Return the dtype of a unit's tensors: masters are float32 under bfloat16."""
        dtype = self.order_of(model_stage).dtype
        return torch.promote_types(dtype, torch.float32) if trains else dtype

    def prefixes(self, model_stage: str) -> dict[str, None]:
        """Return under which names a model-stage's slices travel."""
        return dict.fromkeys(PREFIXES if stage_of(model_stage) == "training" else ("",))

    def describe(self, model_stage: str, layout: Layout, rank: int) -> HeldTensors:
        """Return a rank's tensors, none of which is made yet."""
        trains = stage_of(model_stage) == "training"
        dtype, device = self.dtype_of(model_stage, trains), self.context.torch_device
        return HeldTensors(self.spec_of(model_stage), layout, rank, trains=trains, dtype=dtype, device=device)

    def form(self, key: UnitKey, replica: int, links: Links, counters: Counters, policy_version: int | None) -> None:
        """Put a unit in force over the tensors of the pool; its compute weights are copies under bfloat16 only."""
        order, held = self.orders[key.model_stage], self.transition.pool[key]
        trains = stage_of(key.model_stage) == "training"
        weights = held.tensors[""]
        if held.dtype != order.dtype:
            weights = {name: torch.empty_like(tensor, dtype=order.dtype) for name, tensor in weights.items()}
        shard = DecoderShard(
            held.spec,
            held.layout,
            held.rank,
            group=links.tp,
            dtype=order.dtype,
            device=self.context.torch_device,
            tensors=weights,
        )
        unit = Unit(replica, shard, links, key)
        if trains:
            assert order.optimizer is not None and order.loss is not None
            state = [held.tensors[prefix] for prefix in PREFIXES]
            unit.training = TrainingUnit(shard, links, order.optimizer, order.loss, state)
            unit.training.optimizer.updates = counters.updates
            unit.training.skipped_in_a_row = counters.skipped_in_a_row
            unit.training.refresh_compute_weights()
            unit.staged = StagedUnit(shard, unit.training)
            self.shards.hold(key.model_stage, unit.staged)
        else:
            shard.requires_grad_(False)
        if key.model_stage == "actor.generation":
            unit.policy_version = policy_version
        self.units[key.model_stage] = unit

    def connect_sync(self, epoch: int, training: StagePlan, generation: StagePlan) -> None:
        """Connect the devices that exchange the actor's weights and settle what each sends."""
        self._sync = self.make_sync(epoch, training, generation)

    def make_sync(self, epoch: int, training: StagePlan, generation: StagePlan) -> tuple[WeightSync, Communicator]:
        """Return what one weight sync after the other goes through on these plans."""
        devices = tuple(sorted({*training.devices, *generation.devices}))
        communicator = self.connect("weight_sync", epoch, devices.index(self.context.device), len(devices))
        order = self.order_of("actor.training")
        spec, dtype = order.source.spec, order.dtype
        copies = sync_copies(spec, training, generation)
        sync = WeightSync(copies, devices, self.context.device, dtype=dtype, torch_device=self.context.torch_device)
        return sync, communicator

    def replace_sync(self, sync: tuple[WeightSync, Communicator] | None) -> None:
        """Go on with another weight sync."""
        if self._sync is not None:
            self._sync[1].close()
        self._sync = sync

    def connect(self, name: str, epoch: int, rank: int, size: int) -> Communicator:
        """Join a group of devices."""
        return Communicator.connect(
            store_address=self.context.store_address,
            name=name,
            epoch=epoch,
            rank=rank,
            size=size,
            torch_device=self.context.torch_device,
            abort=self.context.abort,
        )

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
        sync.run(
            SliceStore(training.shard, dict(training.shard.named_parameters())) if training else None,
            SliceStore(generation.shard, dict(generation.shard.named_parameters())) if generation else None,
            communicator,
        )
        communicator.trim()
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
        return responses if unit.links.rank == 0 else None

    def infer_logprobs(self, model_stage: str, work: InferenceWork, temperature: float) -> list[np.ndarray]:
        unit = self.units[model_stage]
        return infer_logprobs(unit.shard, unit.links, work, temperature)

    def infer_values(self, model_stage: str, work: InferenceWork) -> list[np.ndarray]:
        unit = self.units[model_stage]
        return infer_values(unit.shard, unit.links, work)

    def infer_scores(self, model_stage: str, work: InferenceWork) -> list[np.ndarray]:
        unit = self.units[model_stage]
        return infer_scores(unit.shard, unit.links, work)

    def train(self, model_stage: str, work: TrainingWork, learning_rate: LearningRate) -> TrainingStats:
        """Run all updates of a step of actor.training or critic.training."""
        unit = self.units[model_stage]
        assert unit.training is not None
        stats = unit.training.train(work, learning_rate)
        unit.links.replica.trim()
        return stats

    def probe(self, order: ProbeOrder) -> ProbeResult:
        """Measure how fast this device moves bytes."""
        return probe(order, self.context)

    # Staged state

    def restore(self, model_stage: str, folder: str, shards: Sequence[ShardRecord], counters: Counters) -> Restored:
        """Read this rank's parameters, moments and counters from a committed set."""
        staged = self.units[model_stage].staged
        assert staged is not None
        with torch.no_grad():
            return staged.restore(model_stage, folder, shards, counters)

    def hold_shards(self, orders: Sequence[ShardOrder]) -> None:
        """Take the orders of all shards that this device writes for each commit."""
        staged = {name: unit.staged for name, unit in self.units.items() if unit.staged is not None}
        self.shards = ShardWorks(orders, staged)

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
        self.transition.begin(order)

    def run_primitive(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        """Do this device's part of a primitive; return the bytes received or read."""
        return self.transition.run(primitive, restore)

    def feed_shard(self, primitive_id: str, record: ShardRecord | None, failure: str | None) -> None:
        """Tell a `restore` of another shard of its set; beside the other commands."""
        self.transition.feed(primitive_id, record, failure)

    def drop_primitive(self, primitive: Primitive) -> None:
        """Let go of what a failed primitive was making."""
        self.transition.drop(primitive)

    def sum_up(self, keys: Sequence[UnitKey]) -> dict[UnitKey, dict[str, int]]:
        """Return the checksums of what this device holds of some units."""
        return self.transition.sum_up(keys)

    def commit_transition(self, epoch: int, counters: Mapping[str, Counters], policy_version: int) -> None:
        """Put the new plan's units in force."""
        self.transition.commit(counters, policy_version)

    def end_transition(self, epoch: int) -> None:
        """Close what belonged to the old plan."""
        self.transition.end()

    def undo_transition(self, epoch: int) -> None:
        """Put the old plan's units in force again."""
        self.transition.undo()

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
        for unit in self.units.values():
            unit.links.close()
        self.units.clear()
        self.orders.clear()
        self.transition.release()
        self.shards = ShardWorks((), {})
        if self._sync is not None:
            self._sync[1].close()
            self._sync = None

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

    def take_peak_memory(self) -> int:
        """Return the peak bytes since the last call, above the worker's baseline, and start anew."""
        peak = self.context.peak_memory_bytes()
        self.context.reset_peak_memory()
        return peak
