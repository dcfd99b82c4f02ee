"""What the search relies on: its bounds are below what `fit` finds, and its arrays say what the plain models say."""

import random

import numpy as np
import pytest

from nereus.cost.moves import weight_sync_operations
from nereus.cost.options import Options
from nereus.cost.rates import Rates
from nereus.layout import Layout
from nereus.plan import StagePlan
from nereus.planner.found import Found
from nereus.planner.pairs import place_row
from nereus.planner.place import Place, surroundings
from nereus.planner.plan_space import PlanSpace
from nereus.planner.search import _Search
from nereus.planner.setting import Setting
from nereus.planner.space import layouts_for
from tests.planner.instances import random_setting


def open_search(setting: Setting) -> _Search:
    layouts = {name: layouts_for(spec, len(setting.order)) for name, spec in setting.job.specs.items()}
    return _Search(PlanSpace(setting, layouts), Found(1))


def test_bounds_are_never_above_what_fits():
    # On some instances hardly any plan fits.
    assert sum(count_plans_above_their_bounds(seed) for seed in range(300, 308)) > 500


def count_plans_above_their_bounds(seed: int) -> int:
    """Check random plans of one instance, and return how many there were that fit."""
    search = open_search(random_setting(seed, least_devices=3, most_devices=8))
    space, draw = search.space, random.Random(seed)
    at_first, below = search._training_bounds(), 0
    for _ in range(60):
        x, g = draw.randrange(len(space.training)), draw.randrange(len(space.generation))
        rough = search._rough_bounds(space.training.take(np.array([x])).along_rows)[0, g]
        fine = search._fine_bounds(space.training.take(np.array([x])), np.array([0]), np.array([g]))[0]
        sync_s = float(space.sync.of(space.training.first[[x]])[0, g])
        by_pair = search._pair_bounds(np.array([x]), np.array([g]))[0]
        places = {space.generation.name: place_row(space.generation, g, 0), **space.training.places(x)}
        for pair in draw.sample(range(len(space.inference)), min(8, len(space.inference))):
            fitted = space.fitter.fit({**places, **space.inference.places(pair)})
            if fitted is None:
                continue
            below += 1
            limit = fitted.work_s * (1 + 1e-9)
            assert at_first[x] <= limit and rough + sync_s <= limit and fine + sync_s <= limit
            assert by_pair[pair] <= limit
            assert space.fitter.fit(fitted.places, sync_s).work_s == pytest.approx(fitted.work_s)
    return below


@pytest.mark.parametrize("seed", range(320, 326))
def test_weight_sync_on_arrays_is_that_of_the_cost_model(seed: int):
    setting = random_setting(seed, least_devices=3, most_devices=8)
    search = open_search(setting)
    training, generation = search.training.first_table, search.generation
    seconds = search.space.sync.of(np.arange(len(training)))
    rates = Rates(setting.cluster.kind, setting.job.precision)
    ids = setting.order.ids

    def stage(table, row: int) -> StagePlan:
        place = place_row(table, row, 0)
        return StagePlan(place.dp, place.layout, tuple(ids[p] for p in place.positions), 1)

    for a in range(len(training)):
        for g in range(len(generation)):
            spec = setting.job.specs["actor.training"]
            plain = weight_sync_operations(spec, stage(training, a), stage(generation, g), setting.cluster, rates)
            assert seconds[a, g] == pytest.approx(float(plain.total_s(setting.efficiencies)))


@pytest.mark.parametrize("seed", range(330, 334))
def test_blocks_cross_nodes_where_their_devices_do(seed: int):
    setting = random_setting(seed, least_devices=5, most_devices=12)
    order, cluster = setting.order, setting.cluster
    for layout in (Layout(1, 1), Layout(2, 1), Layout(1, 2), Layout(3, 1), Layout(2, 2)):
        for start in range(len(order) - layout.size + 1):
            for dp in range(1, (len(order) - start) // layout.size + 1):
                block = Place.block(layout, dp, start)
                listed = Place(layout, dp, block.positions)
                devices = tuple(order.ids[p] for p in block.positions)
                options = Options.of_stage(StagePlan(dp, layout, devices, 1), cluster)
                expected = (bool(options.tp_across[0]), bool(options.pp_across[0]), int(options.nodes[0]))
                for place in (block, listed):
                    found = surroundings(place, order)
                    assert (found.tp_across, found.pp_across, found.nodes) == expected
                    assert found.slowdown == setting.efficiencies.slowdown(devices)
