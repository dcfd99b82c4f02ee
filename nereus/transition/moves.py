"""What the move of one model-stage asks of the machine: bytes by node, and set-ups of communicators by device."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nereus.cluster import Cluster
from nereus.cost.activations import COMPUTE_BYTES, lifted_bytes
from nereus.cost.rank_memory import Precision
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan, stage_of
from nereus.transition.overlap import common_elements, held_elements


@dataclass(frozen=True)
class StageMove:
    """One model-stage's part of a transition. Arrays are float64 by node, in bytes, unless said otherwise.

    Attributes:
        into: from other nodes.
        out_of: to other nodes, senders sharing the load.
        inside: most bytes that a device receives from others of its node.
        staged: read from storage.
        messages: by device, what the set-up of its new communicators takes, in messages.
        reachable: whether live devices hold all of the state.
    """

    into: np.ndarray
    out_of: np.ndarray
    inside: float
    staged: np.ndarray
    messages: np.ndarray
    reachable: bool


class Moves:
    """Moves of model-stages on one cluster, each pair of placements worked out once."""

    def __init__(self, specs: Mapping[str, ModelSpec], precision: Precision, cluster: Cluster) -> None:
        """Args: cluster: all devices that plans may name, those about to leave included."""
        self._specs, self._precision = specs, precision
        self._index = {device.id: index for index, device in enumerate(cluster.devices)}
        self._node_of = np.unique([device.node for device in cluster.devices], return_inverse=True)[1]
        self._num_nodes = int(self._node_of.max()) + 1
        self._moves: dict[Any, StageMove] = {}

    def of(self, name: str, current: StagePlan, target: StagePlan, lost: frozenset[int] = frozenset()) -> StageMove:
        """Return the move of one model-stage; `lost` are devices whose memory is gone."""
        gone = lost.intersection(current.devices)
        key = (name, current.layout, current.devices, target.layout, target.devices, gone)
        if key not in self._moves:
            self._moves[key] = self._compute(name, current, target, gone)
        return self._moves[key]

    def between_all(self, name: str, stages: Sequence[StagePlan]) -> dict[str, np.ndarray]:
        """Return the moves between all pairs of placements of a model-stage, by field of StageMove: [n, n, ...]."""
        number = {(stage.layout, stage.devices): stage for stage in stages}
        index = {place: i for i, place in enumerate(number)}
        rows = np.array([index[stage.layout, stage.devices] for stage in stages])
        moves = [[self.of(name, current, target) for target in number.values()] for current in number.values()]
        pairs = np.ix_(rows, rows)
        return {
            field: np.array([[getattr(move, field) for move in row] for row in moves])[pairs]
            for field in ("into", "out_of", "inside", "staged", "messages")
        }

    def setup_among(self, devices: frozenset[int]) -> np.ndarray:
        """Return float64 [devices]: the messages of setting up one communicator among some devices."""
        messages = np.zeros(len(self._node_of))
        messages[[self._index[device] for device in devices]] = setup_messages(len(devices))
        return messages

    def written_bytes(self, name: str, stage: StagePlan) -> float:
        """Return what the busiest node writes of a model-stage: owners share trained state; frozen models are read."""
        if stage_of(name) != "training":
            return 0.0
        nodes = len({int(self._node_of[self._index[device]]) for device in stage.devices})
        return float(held_elements(self._specs[name], Layout(1, 1))[0]) * self._element_bytes(name) / nodes

    def _element_bytes(self, name: str) -> int:
        if stage_of(name) == "training":  # master weights and two moments; copies in compute precision are derived
            return 3 * lifted_bytes(self._precision)
        return COMPUTE_BYTES[self._precision]

    def _compute(self, name: str, current: StagePlan, target: StagePlan, gone: frozenset[int]) -> StageMove:
        spec, element_bytes = self._specs[name], self._element_bytes(name)
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

        def by_node(elements: np.ndarray) -> np.ndarray:
            return np.bincount(self._node_of[targets], elements * float(element_bytes), self._num_nodes)

        into, senders = by_node(held[target_ranks] - on_node), present.any(axis=1)
        return StageMove(
            into=into,
            out_of=np.where(senders, into.sum() / max(1, senders.sum()), 0.0),
            inside=float(np.max(on_node - resident) * element_bytes),
            staged=by_node(held[target_ranks] - resident),
            messages=self._messages(name, current, target, targets, gone),
            reachable=bool(present.any(axis=0).all()),
        )

    def _messages(
        self, name: str, current: StagePlan, target: StagePlan, targets: np.ndarray, gone: frozenset[int]
    ) -> np.ndarray:
        """Return the messages of the communicators that each device joins anew: inside its replica, and across."""
        messages = np.zeros(len(self._node_of))
        if (current.layout, current.devices) == (target.layout, target.devices) and not gone:
            return messages
        kept = set(current.replicas) if current.layout == target.layout else set()
        is_new = np.array([replica not in kept or not gone.isdisjoint(replica) for replica in target.replicas])
        inside = setup_messages(target.layout.tp) + setup_messages(target.layout.pp)
        across = setup_messages(target.dp) if stage_of(name) == "training" else 0.0
        messages[targets] = across + inside * np.repeat(is_new, target.layout.size)
        return messages

    def _ranks(self, stage: StagePlan, gone: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the device indices and ranks of what is left of a model-stage, int64 [n] each."""
        devices = np.array([self._index[device] for device in stage.devices], dtype=np.int64)
        ranks = np.arange(len(devices)) % stage.layout.size
        if not gone:
            return devices, ranks
        alive = np.array([device not in gone for device in stage.devices])
        return devices[alive], ranks[alive]


def setup_messages(ranks: int) -> float:
    """Return how many messages long the set-up of a communicator is: ranks find each other as in a binary tree."""
    return 1.0 + math.log2(ranks) if ranks > 1 else 0.0
