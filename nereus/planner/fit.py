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

from nereus.cost.options import Options
from nereus.cost.step import phases_of
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan, stage_of
from nereus.planner.place import Place, Surroundings, makespan_s, num_nodes, overlaps, surroundings
from nereus.planner.rank_arrays import MemoryFormulas, RankTypes, rank_types, take_ranks
from nereus.planner.setting import Floats, Setting
from nereus.planner.space import Ints, micro_batch_steps
from nereus.planner.sync import placed_sync_s, sync_fits
from nereus.planner.tables import Choices, StageTable

# The number of slots is found in rounds of so many guesses.
_GUESSES = 32


@dataclass(frozen=True)
class Choice:
    """A micro-batch and recomputation of a model-stage, and its seconds by phase."""

    micro_batch: int
    recompute: bool
    seconds: Mapping[str, float]

    @cached_property
    def early_s(self) -> float:
        """Seconds of the first phase."""
        return next(iter(self.seconds.values()))


@dataclass(frozen=True)
class Fitted:
    """Places with the choices that make the step fastest, and its seconds.

    `work_s` leaves out those in which no device works (`Efficiencies.step_s`): they are the same for all plans, and the
    bounds of the search leave them out too.
    """

    places: Mapping[str, Place]
    choices: Mapping[str, Choice]
    work_s: float

    def plan(self, setting: Setting) -> Plan:
        """Return the plan with device ids."""
        ids = np.array(setting.order.ids)
        stages = {}
        for name, place in self.places.items():
            devices = tuple(ids[place.positions].tolist())
            choice = self.choices[name]
            stages[name] = StagePlan(place.dp, place.layout, devices, choice.micro_batch, choice.recompute)
        return Plan.of(stages)


@dataclass(frozen=True)
class _Menu:
    """All choices of a model-stage with one layout and dp, and the bytes of their hungriest phase by rank [size, v]."""

    micro_batch: Ints
    recompute: NDArray[np.bool_]
    need: Ints


@dataclass
class Fitter:
    """Fits places in one setting; what is the same for several places is worked out once.

    `tables` hold seconds that are known already, by model-stage.
    """

    setting: Setting
    tables: Mapping[str, StageTable] = field(default_factory=dict, repr=False)
    _kinds: dict[tuple[str, Layout], RankTypes] = field(default_factory=dict, repr=False)
    _residents: dict[tuple[str, Layout], Ints] = field(default_factory=dict, repr=False)
    _menus: dict[tuple[str, Layout, int], _Menu] = field(default_factory=dict, repr=False)
    _priced: dict[tuple, list[tuple[int, Choice]]] = field(default_factory=dict, repr=False)

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
        if not sync_fits(places, room, self.setting):
            return None
        return self._fastest(places, choices, placed_sync_s(places, self.setting) if sync_s is None else sync_s)

    def room(self, places: Mapping[str, Place]) -> Ints:
        """Return by position the bytes that are left beside what is resident; it may be negative."""
        room = self.setting.order.usable_bytes.copy()
        trained = []
        for name, place in places.items():
            room[place.positions] -= np.tile(self._resident(name, place.layout), place.dp)
            trained += [place.positions] if stage_of(name) == "training" else []
        if trained:
            room[np.unique(np.concatenate(trained))] -= self.setting.workload.staging_buffer_bytes
        return room

    def _types(self, name: str, layout: Layout) -> RankTypes:
        key = (name, layout)
        if key not in self._kinds:
            self._kinds[key] = rank_types(self.setting.job.specs[name], (layout,))
        return self._kinds[key]

    def _resident(self, name: str, layout: Layout) -> Ints:
        """Return by rank what it holds always."""
        key = (name, layout)
        if key not in self._residents:
            types = self._types(name, layout)
            self._residents[key] = self._formulas.resident(stage_of(name), types.ranks)[types.of_rank[0]]
        return self._residents[key]

    def _choices(self, name: str, place: Place, room: Ints) -> list[Choice]:
        """Return the choices that fit, without those that another one beats in every phase."""
        by_rank = room[place.by_replica].min(axis=0)
        around = surroundings(place, self.setting.order)
        if stage_of(name) == "generation":
            slots = self._slots(name, place, by_rank)
            return [self._generation_choice(name, place, around, slots)] if slots else []
        menu = self._menu(name, place)
        fitting = (menu.need <= by_rank[:, None]).all(axis=0).tolist()
        best: list[Choice] = []
        for index, choice in self._price(name, place, menu, around):
            # They come by the seconds of their last phase; a later one is worth it if it is faster in the first.
            if fitting[index] and (not best or choice.early_s < best[-1].early_s):
                best.append(choice)
        return best

    def choices_beside(self, name: str, place: Place) -> Choices | None:
        """Return the choices of one place, as a table with one row; None where the tables' seconds hold there too."""
        around = surroundings(place, self.setting.order)
        if self._known_row(name, place, around) is not None:
            return None
        menu = self._menu(name, place)
        seconds = self._seconds(name, place, around, menu.micro_batch, menu.recompute)
        rows = {phase: each[None] for phase, each in seconds.items()}
        return Choices(menu.need[:1], {**rows, "both": sum(rows.values(), np.zeros(1))})

    def _menu(self, name: str, place: Place) -> _Menu:
        key = (name, place.layout, place.dp)
        if key not in self._menus:
            stage, share = stage_of(name), self.setting.workload.share(name, place.dp)
            most = self.setting.job.most_micro_batch
            steps = np.unique(micro_batch_steps(np.array([share]), np.array([place.layout.pp]), most))[::-1]
            micro_batch = np.concatenate([steps, steps]) if stage == "training" else steps
            recompute = np.arange(len(micro_batch)) >= len(steps)
            types = self._types(name, place.layout)
            ranks = take_ranks(types.ranks, np.arange(len(types.ranks.tp))[:, None])
            need = self._formulas.phase(stage, ranks, share, micro_batch, recompute, place.dp)
            self._menus[key] = _Menu(micro_batch, recompute, need[types.of_rank[0]])
        return self._menus[key]

    def _price(self, name: str, place: Place, menu: _Menu, around: Surroundings) -> list[tuple[int, Choice]]:
        """Return all choices with their indices, fastest first."""
        key = (name, place.layout, place.dp, around)
        if key not in self._priced:
            seconds = self._known(name, place, menu, around)
            if seconds is None:
                seconds = self._seconds(name, place, around, menu.micro_batch, menu.recompute)
            choices = [
                Choice(int(size), bool(again), {phase: float(each[i]) for phase, each in seconds.items()})
                for i, (size, again) in enumerate(zip(menu.micro_batch, menu.recompute, strict=True))
            ]
            order = sorted(range(len(choices)), key=lambda i: tuple(choices[i].seconds.values())[::-1])
            self._priced[key] = [(i, choices[i]) for i in order]
        return self._priced[key]

    def _known_row(self, name: str, place: Place, around: Surroundings) -> int | None:
        """Return the row of the tables that has the seconds of a place with such surroundings, if there is one."""
        table = self.tables.get(name)
        row = None if table is None else table.row_of.get((place.layout, place.dp))
        if table is None or table.choices is None or row is None:
            return None
        at_front = place.start == 0 or around == surroundings(
            Place.block(place.layout, place.dp, 0), self.setting.order
        )
        return row if at_front else None

    def _known(self, name: str, place: Place, menu: _Menu, around: Surroundings) -> dict[str, Floats] | None:
        """Return the seconds of a menu from the tables, if they have them for such surroundings."""
        row = self._known_row(name, place, around)
        if row is None:
            return None
        known = self.tables[name].choices
        assert known is not None
        # Tables have choices without and with recomputation in turn, a menu first all without.
        kinds = 1 + int(menu.recompute.any())
        columns = np.arange(len(menu.micro_batch)).reshape(-1, kinds).T.reshape(-1)
        return {phase: known.seconds[phase][row, columns] for phase in phases_of(name)}

    def _slots(self, name: str, place: Place, by_rank: Ints) -> int:
        """Return the most sequences in flight that fit, up to the replica's share; 0 when not even one does."""
        share = self.setting.workload.share(name, place.dp)
        types = self._types(name, place.layout)
        kinds = len(types.ranks.tp)
        room = np.array([by_rank[types.of_rank[0] == kind].min() for kind in range(kinds)])[:, None]
        ranks = take_ranks(types.ranks, np.arange(kinds)[:, None])
        low, high = 0, share  # low fits
        while low < high:
            step = max(1, -(-(high - low) // _GUESSES))
            guesses = np.arange(low + step, high + step, step).clip(max=high)
            needs = self._formulas.phase("generation", ranks, share, guesses)
            fitting = int((needs <= room).all(axis=0).sum())
            if fitting < len(guesses):
                high = int(guesses[fitting]) - 1
            low = int(guesses[fitting - 1]) if fitting else low
        return low

    def _generation_choice(self, name: str, place: Place, around: Surroundings, slots: int) -> Choice:
        key = (name, place.layout, place.dp, around, slots)
        if key not in self._priced:
            seconds = self._seconds(name, place, around, np.array([slots]), np.array([False]))
            self._priced[key] = [(0, Choice(slots, False, {phase: float(each[0]) for phase, each in seconds.items()}))]
        return self._priced[key][0][1]

    def _seconds(
        self, name: str, place: Place, around: Surroundings, micro_batch: Ints, recompute: NDArray[np.bool_]
    ) -> dict[str, Floats]:
        ones = np.ones(len(micro_batch))
        options = Options(
            dp=place.dp * ones,
            tp=place.layout.tp * ones,
            pp=place.layout.pp * ones,
            micro_batch=micro_batch.astype(np.float64),
            recompute=recompute,
            tp_across=np.full(len(ones), around.tp_across),
            pp_across=np.full(len(ones), around.pp_across),
            nodes=around.nodes * ones,
        )
        return self.setting.seconds(name, options, around.slowdown)

    def _fastest(self, places: Mapping[str, Place], choices: Mapping[str, list[Choice]], sync_s: float) -> Fitted:
        """Return the combination of choices with the shortest step."""
        order = self.setting.order
        names, waits_for = list(places), overlaps(places, len(order))
        trained = [place for name, place in places.items() if stage_of(name) == "training"]
        staging_s = float(self.setting.staging_s[num_nodes(trained, order)])
        best: tuple[float, tuple[Choice, ...]] | None = None
        for picks in itertools.product(*(choices[name] for name in names)):
            generation, inference, training = (
                makespan_s([pick.seconds.get(phase) for pick in picks], waits_for)
                for phase in ("generation", "inference", "training")
            )
            total = max(generation + inference, staging_s) + training + sync_s
            if best is None or total < best[0]:
                best = (total, picks)
        assert best is not None
        return Fitted(places, dict(zip(names, best[1], strict=True)), best[0])
