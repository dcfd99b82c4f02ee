"""What a transition costs on either transport: a critical-path estimate from what each device lacks.

Per model-stage, a target rank lacks the elements of its slices that its device doesn't hold already. They come from a
holder on the same node where there is one, else over the node's link to the others; senders share the load evenly.
The slowest node decides, and the set-up of new communicators, one after the other on each device, comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nereus.cluster import Cluster
from nereus.cost.efficiency import Efficiencies
from nereus.cost.step import JobSpec
from nereus.plan import Plan
from nereus.transition.moves import Moves, StageMove
from nereus.transition.primitives import TransportChoice


@dataclass(frozen=True)
class TransitionPrice:
    """Seconds and bytes of a transition.

    Attributes:
        direct_s: over live links; None when some state has no live holder, or the job doesn't move by them.
        staged_s: through storage; infinite when the job doesn't move by it.
        direct_bytes, staged_bytes: what travels between nodes, and what is read from storage.
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

    def only(self, transport: TransportChoice) -> TransitionPrice:
        """Return the price for a job that moves by one transport; what has no live holder is staged all the same."""
        if transport == "staged":
            return replace(self, direct_s=None)
        return replace(self, staged_s=math.inf) if transport == "direct" and self.direct_s is not None else self

    def to_record(self) -> dict[str, Any]:
        """Return {direct, staged, direct_bytes, staged_bytes}; times in seconds, None where there is none."""
        return {
            "direct": self.direct_s,
            "staged": self.staged_s if math.isfinite(self.staged_s) else None,
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


# The weight sync's communicator joins both of the actor's model-stages.
_ACTOR = ("actor.generation", "actor.training")


def _actor_devices(plan: Plan) -> frozenset[int]:
    return frozenset(device for name in _ACTOR if name in plan for device in plan[name].devices)


def _differ(places: Sequence[Any]) -> np.ndarray:
    """Return bool [n, n]: which two of some places differ."""
    number = {place: index for index, place in enumerate(dict.fromkeys(places))}
    index = np.array([number[place] for place in places])
    return index[:, None] != index[None, :]


class TransitionPricer:
    """Prices of transitions on one cluster; what two of them have in common is worked out once."""

    def __init__(self, job: JobSpec, cluster: Cluster) -> None:
        """Args: cluster: all devices that plans may name, those about to leave included."""
        self._kind = cluster.kind
        self._moves = Moves(job.specs, job.precision, cluster)

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
        moves = [self._moves.of(name, current[name], target[name], lost) for name in target]
        link_s, staged_read_s, setup_s = (float(s) for s in self._seconds(moves, current, target, efficiencies))
        staged_s = setup_s + staged_read_s
        is_reachable = all(move.reachable for move in moves)
        if not committed and is_reachable:
            written = sum(self._moves.written_bytes(name, stage) for name, stage in current.items())
            staged_s += written / self._storage_bytes_s(efficiencies, "storage_write")
        return TransitionPrice(
            link_s + setup_s if is_reachable else None,
            staged_s,
            int(sum(move.into.sum() for move in moves)),
            int(sum(move.staged.sum() for move in moves)),
        )

    def estimate_all(self, plans: Sequence[Plan], efficiencies: Efficiencies) -> np.ndarray:
        """Return float64 [plans, plans]: seconds from each plan to each other on the cheaper transport; no device lost.

        The same numbers as `estimate` gives, pair by pair.
        """
        names = list(plans[0])
        parts = [self._moves.between_all(name, [plan[name] for plan in plans]) for name in names]
        into, out_of, staged = (np.sum([part[key] for part in parts], axis=0) for key in ("into", "out_of", "staged"))
        inside = np.sum([part["inside"] for part in parts], axis=0)
        messages = np.sum([part["messages"] for part in parts], axis=0)
        changed = np.zeros((len(plans), len(plans)), dtype=bool)
        for name in names:
            if name in _ACTOR:
                changed |= _differ([_places(plan)[name] for plan in plans])
        sync = np.stack([self._moves.setup_among(_actor_devices(plan)) for plan in plans])
        messages = messages + changed[:, :, None] * sync[None]
        network = np.maximum(into.max(axis=2), out_of.max(axis=2)) / self._kind.inter_node.bandwidth_bytes_s
        link_s = np.maximum(network, inside / self._kind.intra_node.bandwidth_bytes_s) / efficiencies.efficiency["p2p"]
        staged_s = staged.max(axis=2) / self._storage_bytes_s(efficiencies, "storage_read")
        return np.minimum(link_s, staged_s) + messages.max(axis=2) * efficiencies.latency_s["comm_setup"]

    def _seconds(
        self, moves: Sequence[StageMove], current: Plan, target: Plan, efficiencies: Efficiencies
    ) -> tuple[float, float, float]:
        """Return the seconds on the links, of reading from storage, and of setting communicators up."""
        network = max(sum(move.into for move in moves).max(), sum(move.out_of for move in moves).max())  # type: ignore[union-attr]
        inside = sum(move.inside for move in moves)
        link_s = max(
            network / self._kind.inter_node.bandwidth_bytes_s, inside / self._kind.intra_node.bandwidth_bytes_s
        )
        staged = sum(move.staged for move in moves).max()  # type: ignore[union-attr]
        messages = sum(move.messages for move in moves)
        if any(_places(current)[name] != _places(target)[name] for name in _ACTOR if name in target):
            messages = messages + self._moves.setup_among(_actor_devices(target))
        return (
            link_s / efficiencies.efficiency["p2p"],
            staged / self._storage_bytes_s(efficiencies, "storage_read"),
            float(np.max(messages)) * efficiencies.latency_s["comm_setup"],
        )

    def _storage_bytes_s(self, efficiencies: Efficiencies, name: str) -> float:
        return self._kind.storage.bandwidth_bytes_s * efficiencies.efficiency[name]


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
