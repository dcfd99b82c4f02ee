"""What a transition costs on either transport: a critical-path estimate from what each device lacks.

Per model-stage, a target rank lacks the elements of its slices that its device doesn't hold already. They come from a
holder on the same node where there is one, else over the node's link to the others; senders share the load evenly.
The slowest node decides, and set-up of new communicators comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.cluster import Cluster
from nereus.cost.activations import COMPUTE_BYTES, lifted_bytes
from nereus.cost.efficiency import Efficiencies
from nereus.cost.step import JobSpec
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan, stage_of
from nereus.transition.overlap import common_elements, held_elements


@dataclass(frozen=True)
class TransitionPrice:
    """Seconds and bytes of a transition.

    Attributes:
        direct_s: over live links; None when some state has no live holder.
        staged_s: through storage.
        direct_bytes, staged_bytes: what travels between devices, and what is read from storage.
    """

    direct_s: float | None
    staged_s: float
    direct_bytes: int = 0
    staged_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Seconds of the cheaper possible transport."""
        return self.staged_s if self.direct_s is None else min(self.direct_s, self.staged_s)

    @property
    def transport(self) -> str:
        return "direct" if self.direct_s is not None and self.direct_s <= self.staged_s else "staged"

    def to_record(self) -> dict[str, Any]:
        """Return {direct, staged, direct_bytes, staged_bytes}; times in seconds."""
        return {
            "direct": self.direct_s,
            "staged": self.staged_s,
            "direct_bytes": self.direct_bytes,
            "staged_bytes": self.staged_bytes,
        }


FREE = TransitionPrice(0.0, 0.0)


def moves_state(current: Plan, target: Plan) -> bool:
    """Return whether the change from one plan to the other is a transition: micro-batch and recomputation aren't."""
    return _places(current) != _places(target)


def changes_layout(current: Plan, target: Plan) -> bool:
    """Return whether any model-stage's tp or pp differs."""
    return {name: s.layout for name, s in current.items()} != {name: s.layout for name, s in target.items()}


def _places(plan: Plan) -> dict[str, Any]:
    return {name: (stage.layout, stage.devices) for name, stage in plan.items()}


@dataclass(frozen=True)
class StageTraffic:
    """What one model-stage's move asks of the machine; arrays are by node, in bytes.

    Attributes:
        into: from other nodes.
        out_of: to other nodes, senders sharing the load.
        inside: most bytes that a device receives from others of its node.
        staged: read from storage.
        reachable: whether live devices hold all of the state.
    """

    into: np.ndarray
    out_of: np.ndarray
    inside: float
    staged: np.ndarray
    reachable: bool


class TransitionPricer:
    """Prices of transitions on one cluster, model-stage by model-stage, each pair of placements worked out once."""

    def __init__(self, job: JobSpec, cluster: Cluster) -> None:
        """Args: cluster: all devices that plans may name, those about to leave included."""
        self._specs, self._precision, self._kind = job.specs, job.precision, cluster.kind
        self._index = {device.id: index for index, device in enumerate(cluster.devices)}
        nodes = [device.node for device in cluster.devices]
        self._node_of = np.unique(nodes, return_inverse=True)[1]
        self._num_nodes = int(self._node_of.max()) + 1
        self._traffic: dict[Any, StageTraffic] = {}

    def estimate(
        self,
        current: Plan,
        target: Plan,
        efficiencies: Efficiencies,
        *,
        lost: frozenset[int] = frozenset(),
        committed: bool = True,
    ) -> TransitionPrice:
        """Return the price of going from one plan to another.

        Args:
            lost: devices of the current plan whose memory is gone.
            committed: whether a commit of this boundary exists or is pending: then staging writes nothing more.
        """
        if not moves_state(current, target) and not lost & set(current.devices):
            return FREE
        traffic = [self._stage(name, current[name], target[name], lost) for name in target]
        into, out_of = sum(t.into for t in traffic), sum(t.out_of for t in traffic)
        staged = sum(t.staged for t in traffic)
        link_s = max(np.max(into), np.max(out_of)) / self._kind.inter_node.bandwidth_bytes_s
        link_s = max(link_s, sum(t.inside for t in traffic) / self._kind.intra_node.bandwidth_bytes_s)
        setup_s = self._setup_s(current, target, efficiencies)
        moved = int(np.sum(into) + sum(t.inside for t in traffic))
        direct_s = link_s / efficiencies.efficiency["p2p"] + setup_s
        staged_s = setup_s + np.max(staged) / self._storage_bytes_s(efficiencies, "storage_read")
        if not committed and all(t.reachable for t in traffic):
            written = sum(self._written_bytes(name, stage) for name, stage in current.items())
            staged_s += written / self._storage_bytes_s(efficiencies, "storage_write")
        reachable = all(t.reachable for t in traffic)
        return TransitionPrice(float(direct_s) if reachable else None, float(staged_s), moved, int(np.sum(staged)))

    def _storage_bytes_s(self, efficiencies: Efficiencies, name: str) -> float:
        return self._kind.storage.bandwidth_bytes_s * efficiencies.efficiency[name]

    def _written_bytes(self, name: str, stage: StagePlan) -> float:
        """Return what the busiest node writes: owners share the state of trained models; frozen ones aren't written."""
        if stage_of(name) != "training":
            return 0.0
        nodes = len({int(self._node_of[self._index[device]]) for device in stage.devices})
        return int(held_elements(self._specs[name], type(stage.layout)(1, 1))[0]) * self._element_bytes(name) / nodes

    def _element_bytes(self, name: str) -> int:
        if stage_of(name) == "training":  # master weights and two moments; copies in compute precision are derived
            return 3 * lifted_bytes(self._precision)
        return COMPUTE_BYTES[self._precision]

    def _stage(self, name: str, current: StagePlan, target: StagePlan, lost: frozenset[int]) -> StageTraffic:
        gone = lost.intersection(current.devices)
        key = (name, current.layout, current.devices, target.layout, target.devices, gone)
        if key not in self._traffic:
            self._traffic[key] = self._compute_stage(
                self._specs[name], current, target, gone, self._element_bytes(name)
            )
        return self._traffic[key]

    def _compute_stage(
        self, spec: ModelSpec, current: StagePlan, target: StagePlan, gone: frozenset[int], element_bytes: int
    ) -> StageTraffic:
        common, held = common_elements(spec, current.layout, target.layout), held_elements(spec, target.layout)
        sources, source_ranks = self._ranks(current, gone)
        targets, target_ranks = self._ranks(target, frozenset())
        have_rank = np.full(len(self._node_of), -1)
        have_rank[sources] = source_ranks
        # Which ranks of the current layout are on which node: [nodes, source ranks].
        present = np.zeros((self._num_nodes, current.layout.size), dtype=bool)
        present[self._node_of[sources], source_ranks] = True
        resident = np.where(have_rank[targets] >= 0, common[have_rank[targets], target_ranks], 0)
        on_node = np.minimum((present @ common)[self._node_of[targets], target_ranks], held[target_ranks])
        lacking = held[target_ranks] - resident
        far = held[target_ranks] - on_node
        into = np.bincount(self._node_of[targets], far * element_bytes, self._num_nodes)
        out_of = np.where(present.any(axis=1), into.sum() / max(1, present.any(axis=1).sum()), 0.0)
        staged = np.bincount(self._node_of[targets], lacking * element_bytes, self._num_nodes)
        reachable = bool(present.any(axis=0).all())
        return StageTraffic(into, out_of, float(np.max(on_node - resident) * element_bytes), staged, reachable)

    def _ranks(self, stage: StagePlan, gone: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        pairs = [
            (self._index[device], i % stage.layout.size) for i, device in enumerate(stage.devices) if device not in gone
        ]
        if not pairs:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        devices, ranks = np.array(pairs).T
        return devices, ranks

    def _setup_s(self, current: Plan, target: Plan, efficiencies: Efficiencies) -> float:
        """Return the time to set up what communicators are new, on the device that joins most of them.

        A device takes part in one set-up after the other; a set-up among n ranks takes `1 + log2(n)` messages.
        """
        messages = np.zeros(len(self._node_of))
        for name, stage in target.items():
            old = current[name]
            if (old.layout, old.devices) == (stage.layout, stage.devices):
                continue
            replicas = set(old.replicas) if old.layout == stage.layout else set()
            inside = _messages(stage.layout.tp) + _messages(stage.layout.pp)
            across = _messages(stage.dp) if stage_of(name) == "training" else 0.0
            for replica in stage.replicas:
                cost = across + (0.0 if replica in replicas else inside)
                messages[[self._index[device] for device in replica]] += cost
        if any(
            (current[n].layout, current[n].devices) != (target[n].layout, target[n].devices)
            for n in ("actor.generation", "actor.training")
        ):
            both = sorted(set(target["actor.generation"].devices) | set(target["actor.training"].devices))
            messages[[self._index[device] for device in both]] += _messages(len(both))
        return float(messages.max()) * efficiencies.latency_s["comm_setup"]


def _messages(ranks: int) -> float:
    return 1.0 + math.log2(ranks) if ranks > 1 else 0.0


def estimate_transition(
    current: Plan,
    target: Plan,
    job: JobSpec,
    cluster: Cluster,
    efficiencies: Efficiencies,
    *,
    lost: frozenset[int] = frozenset(),
    committed: bool = True,
) -> Mapping[str, Any]:
    """Return `{direct, staged, direct_bytes, staged_bytes}` of one transition; see TransitionPricer.estimate."""
    pricer = TransitionPricer(job, cluster)
    return pricer.estimate(current, target, efficiencies, lost=lost, committed=committed).to_record()
