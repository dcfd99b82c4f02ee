"""From where model-stages lie to the whole plan: the fastest micro-batches and recomputation that memory allows there.

This is exact, rank by rank and device by device; the search uses it to confirm what its coarser bounds suggest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nereus.cost.activations import COMPUTE_BYTES
from nereus.cost.memory import SYNC_BUCKETS_IN_FLIGHT
from nereus.cost.moves import weight_sync_operations
from nereus.cost.options import Options
from nereus.cost.rates import Rates
from nereus.layout import Layout
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.plan import Plan, StagePlan, stage_of
from nereus.planner.rank_arrays import MemoryFormulas, RankTypes, rank_types, take_ranks
from nereus.planner.setting import Setting
from nereus.planner.space import Ints, micro_batch_steps

# A number of slots is found in rounds of so many guesses.
_GUESSES = 32


@dataclass(frozen=True)
class Place:
    """Where a model-stage lies: `positions` [dp * size] in the cluster's order of devices, in rank order."""

    layout: Layout
    dp: int
    positions: Ints

    @cached_property
    def by_replica(self) -> Ints:
        return self.positions.reshape(self.dp, self.layout.size)


@dataclass(frozen=True)
class Choice:
    """A micro-batch and recomputation of a model-stage, and its seconds by phase."""

    micro_batch: int
    recompute: bool
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Fitted:
    """Places with the choices that make the step fastest; `stages_s` has seconds by stage, `total_s` of the step."""

    places: Mapping[str, Place]
    choices: Mapping[str, Choice]
    total_s: float

    def plan(self, setting: Setting) -> Plan:
        ids = np.array(setting.order.ids)
        stages = {}
        for name, place in self.places.items():
            devices = tuple(ids[place.positions].tolist())
            choice = self.choices[name]
            stages[name] = StagePlan(place.dp, place.layout, devices, choice.micro_batch, choice.recompute)
        return Plan.of(stages)


@dataclass
class Fitter:
    """Fits places in one setting; what is the same for several places is worked out once."""

    setting: Setting
    _residents: dict[tuple[str, Layout], Ints] = field(default_factory=dict, repr=False)
    _needs: dict[tuple[str, Layout, int], tuple[Ints, NDArray[np.bool_], Ints]] = field(
        default_factory=dict, repr=False
    )
    _seconds: dict[tuple, dict[str, list[float]]] = field(default_factory=dict, repr=False)

    @cached_property
    def _formulas(self) -> MemoryFormulas:
        return MemoryFormulas(self.setting.workload, self.setting.job.precision)

    def fit(self, places: Mapping[str, Place], sync_s: float | None = None) -> Fitted | None:
        """Return places with their fastest choices, or None where no choice fits memory.

        Args:
            sync_s: seconds of the weight sync where they are known already.
        """
        room = self.room(places)
        choices = {}
        for name, place in places.items():
            choices[name] = self._choices(name, place, room)
            if not choices[name]:
                return None
        if not self._sync_fits(places, room):
            return None
        return self._fastest(places, choices, self._sync_s(places) if sync_s is None else sync_s)

    def room(self, places: Mapping[str, Place]) -> Ints:
        """Return by position the bytes that are left beside what is resident; it may be negative."""
        residents = np.zeros(len(self.setting.order), dtype=np.int64)
        stages = np.zeros(len(self.setting.order), dtype=np.int64)
        for name, place in places.items():
            residents[place.positions] += np.tile(self._resident(name, place.layout), place.dp)
            if stage_of(name) == "training":
                stages[place.positions] = self.setting.workload.staging_buffer_bytes
        return self.setting.order.usable_bytes - residents - stages

    def _types(self, name: str, layout: Layout) -> RankTypes:
        return rank_types(self.setting.job.specs[name], (layout,))

    def _resident(self, name: str, layout: Layout) -> Ints:
        """Return by rank what it holds always."""
        key = (name, layout)
        if key not in self._residents:
            types = self._types(name, layout)
            self._residents[key] = self._formulas.resident(stage_of(name), types.ranks)[types.of_rank[0]]
        return self._residents[key]

    def _room_by_type(self, name: str, place: Place, room: Ints) -> Ints:
        """Return the least room of each kind of rank over all replicas."""
        of_rank = self._types(name, place.layout).of_rank[0]
        by_rank = room[place.by_replica].min(axis=0)
        result = np.full(int(of_rank.max()) + 1, np.iinfo(np.int64).max)
        np.minimum.at(result, of_rank, by_rank)
        return result

    def _choices(self, name: str, place: Place, room: Ints) -> list[Choice]:
        """Return the choices that fit, without those that another one beats in every phase."""
        rooms = self._room_by_type(name, place, room)
        if stage_of(name) == "generation":
            slots = self._slots(name, place, rooms)
            if slots == 0:
                return []
            seconds = self._choice_seconds(name, place, np.array([slots]), np.array([False]))
            return [Choice(slots, False, {phase: each[0] for phase, each in seconds.items()})]
        micro_batch, recompute, need = self._needs_of(name, place)
        seconds = self._choice_seconds(name, place, micro_batch, recompute)
        fitting = np.flatnonzero((need <= rooms[:, None]).all(axis=0)).tolist()
        fitting.sort(key=lambda i: tuple(each[i] for each in reversed(seconds.values())))
        best: list[Choice] = []
        for i in fitting:
            of_choice = {phase: each[i] for phase, each in seconds.items()}
            if not any(all(other.seconds[p] <= s for p, s in of_choice.items()) for other in best):
                best.append(Choice(int(micro_batch[i]), bool(recompute[i]), of_choice))
        return best

    def _needs_of(self, name: str, place: Place) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """Return micro-batches [v], recomputation [v], and the bytes of the hungriest phase by kind of rank [k, v]."""
        key = (name, place.layout, place.dp)
        if key not in self._needs:
            stage, share = stage_of(name), self.setting.workload.share(name, place.dp)
            steps = np.unique(micro_batch_steps(np.array([share]), np.array([place.layout.pp])))[::-1]
            both = stage == "training"
            micro_batch = np.concatenate([steps, steps]) if both else steps
            recompute = np.arange(len(micro_batch)) >= len(steps)
            ranks = self._types(name, place.layout).ranks
            ranks = take_ranks(ranks, np.arange(len(ranks.tp))[:, None])
            self._needs[key] = micro_batch, recompute, self._formulas.phase(stage, ranks, share, micro_batch, recompute)
        return self._needs[key]

    def _slots(self, name: str, place: Place, rooms: Ints) -> int:
        """Return the most sequences in flight that fit, up to the replica's share; 0 when not even one does."""
        share = self.setting.workload.share(name, place.dp)
        ranks = self._types(name, place.layout).ranks
        ranks = take_ranks(ranks, np.arange(len(ranks.tp))[:, None])
        low, high = 0, share  # low fits
        while low < high:
            guesses = np.unique(np.linspace(low + 1, high, min(_GUESSES, high - low)).astype(np.int64))
            needs = self._formulas.phase("generation", ranks, share, guesses)
            fitting = int((needs <= rooms[:, None]).all(axis=0).sum())
            if fitting < len(guesses):
                high = int(guesses[fitting]) - 1
            low = int(guesses[fitting - 1]) if fitting else low
        return low

    def _choice_seconds(
        self, name: str, place: Place, micro_batch: Ints, recompute: NDArray[np.bool_]
    ) -> dict[str, list[float]]:
        options, slowdown = self._options(place, micro_batch, recompute)
        flags = tuple(float(array[0]) for array in (options.tp_across, options.pp_across, options.nodes))
        generated = int(micro_batch[0]) if stage_of(name) == "generation" else 0
        key = (name, place.layout, place.dp, flags, slowdown, generated)
        if key not in self._seconds:
            seconds = self.setting.seconds(name, options, slowdown)
            self._seconds[key] = {phase: each.tolist() for phase, each in seconds.items()}
        return self._seconds[key]

    def _options(self, place: Place, micro_batch: Ints, recompute: NDArray[np.bool_]) -> tuple[Options, float]:
        order, layout = self.setting.order, place.layout
        nodes = order.node[place.by_replica]
        groups = nodes.reshape(-1, layout.tp)
        tp_across = bool((groups != groups[:, :1]).any())
        pp_across = bool((nodes[:, layout.tp :] != nodes[:, : -layout.tp]).any())
        ones = np.ones(len(micro_batch))
        options = Options(
            dp=place.dp * ones,
            tp=layout.tp * ones,
            pp=layout.pp * ones,
            micro_batch=micro_batch.astype(np.float64),
            recompute=recompute,
            tp_across=ones > 0 if tp_across else ones < 0,
            pp_across=ones > 0 if pp_across else ones < 0,
            nodes=len(np.unique(nodes)) * ones,
        )
        return options, float(order.slowdown[place.positions].max())

    def _sync_fits(self, places: Mapping[str, Place], room: Ints) -> bool:
        """Return whether buffers of the weight sync, and the least that any device needs to work, fit."""
        work = self.setting.workload
        need = np.full(len(room), work.workspace_bytes)
        if "actor.training" in places and "actor.generation" in places:
            source, target = places["actor.training"], places["actor.generation"]
            if not _in_place(source, target):
                for name, place, peers in (
                    ("actor.training", source, target),
                    ("actor.generation", target, source),
                ):
                    others = len(peers.positions) - np.isin(place.positions, peers.positions)
                    others = np.minimum(others, work.most_sync_peers or len(room))
                    need[place.positions] += others * np.tile(self._message_bytes(name, place.layout), place.dp)
        covered = np.zeros(len(room), dtype=bool)
        for place in places.values():
            covered[place.positions] = True
        return bool((need <= room)[covered].all())

    def _message_bytes(self, name: str, layout: Layout) -> Ints:
        types = self._types(name, layout)
        held = types.ranks.parameters * COMPUTE_BYTES[self.setting.job.precision]
        return np.minimum(held, SYNC_BUCKETS_IN_FLIGHT * SYNC_BUCKET_BYTES)[types.of_rank[0]]

    def _sync_s(self, places: Mapping[str, Place]) -> float:
        if "actor.training" not in places or "actor.generation" not in places:
            return 0.0
        setting = self.setting
        ids = np.array(setting.order.ids)
        training, generation = (
            StagePlan(place.dp, place.layout, tuple(ids[place.positions].tolist()), 1)
            for place in (places["actor.training"], places["actor.generation"])
        )
        rates = Rates(setting.cluster.kind, setting.job.precision)
        spec = setting.job.specs["actor.training"]
        sync = weight_sync_operations(spec, training, generation, setting.cluster, rates)
        return float(sync.total_s(setting.efficiencies))

    def _fastest(self, places: Mapping[str, Place], choices: Mapping[str, list[Choice]], sync_s: float) -> Fitted:
        """Return the combination of choices with the shortest step."""
        names, overlaps = list(places), _overlaps(places, len(self.setting.order))
        nodes = [self.setting.order.node[p.positions] for name, p in places.items() if stage_of(name) == "training"]
        staging_s = float(self.setting.staging_s[len(np.unique(np.concatenate(nodes)))]) if nodes else 0.0
        best: tuple[float, tuple[Choice, ...]] | None = None
        for picks in itertools.product(*(choices[name] for name in names)):
            by_phase = {
                phase: _makespan([pick.seconds.get(phase) for pick in picks], overlaps)
                for phase in ("generation", "inference", "training")
            }
            before = by_phase["generation"] + by_phase["inference"]
            total = max(before, staging_s) + by_phase["training"] + sync_s
            if best is None or total < best[0]:
                best = (total, picks)
        assert best is not None
        return Fitted(places, dict(zip(names, best[1], strict=True)), best[0])


def _in_place(training: Place, generation: Place) -> bool:
    if training.layout != generation.layout:
        return False
    held = {tuple(replica) for replica in training.by_replica.tolist()}
    return all(tuple(replica) in held for replica in generation.by_replica.tolist())


def _overlaps(places: Mapping[str, Place], num_devices: int) -> list[list[int]]:
    """Return for each place the indices of those before it that share a device with it."""
    masks = []
    for place in places.values():
        mask = np.zeros(num_devices, dtype=bool)
        mask[place.positions] = True
        masks.append(mask)
    return [[j for j in range(i) if (masks[i] & masks[j]).any()] for i in range(len(masks))]


def _makespan(seconds: list[float | None], overlaps: list[list[int]]) -> float:
    """Return when the last ends, if each starts as soon as those before it that share a device have ended."""
    ends: list[float] = []
    for duration, before in zip(seconds, overlaps, strict=True):
        # One that doesn't run in this phase ends at once and holds nobody up.
        ends.append(0.0 if duration is None else max((ends[j] for j in before), default=0.0) + duration)
    return max(ends, default=0.0)
