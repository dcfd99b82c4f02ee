"""Runners-up, plans with given layouts, plans in force, slow devices, and what is said of plans that don't fit."""

from dataclasses import replace

import pytest

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE
from nereus.cost.load import StepLoad
from nereus.cost.memory import USABLE_SHARE
from nereus.cost.step import JobSpec
from nereus.layout import Layout
from nereus.plan import check_plan
from nereus.planner import Setting, best_plans, best_with, plan_search, refit_plan
from nereus.planner.space import layouts_for
from nereus.presets import model_preset

SPEC = model_preset("llama-3.1-8b")


def setting(devices: int = 16, response_tokens: float = 2000.0, *, critic: bool = True, **changes) -> Setting:
    specs = {"actor.generation": SPEC, "actor.training": SPEC, "reference.inference": SPEC}
    if critic:
        specs["critic.training"] = replace(SPEC, head="value")
    load = StepLoad(256, 4, 512, response_tokens, 1.15 * response_tokens)
    return Setting.of(JobSpec(specs, load), cluster_preset("a100-64gb-hdr", devices), CONSERVATIVE, **changes)


@pytest.mark.parametrize("devices", [16, 24, 40])
def test_plans_are_legal_fit_and_come_fastest_first(devices: int):
    some = setting(devices)
    found = best_plans(some, 10)
    assert len(found) == 10
    assert [each.step_s for each in found] == sorted(each.step_s for each in found)
    for each in found:
        load = some.job.load
        check_plan(each.plan, some.job.specs, some.cluster.device_ids, samples_per_step=load.samples,
                   minibatch_samples=load.smallest_minibatch_samples)  # fmt: skip
        assert each.cost.total_s == pytest.approx(each.step_s)
        capacities = some.cluster.capacities
        assert all(peak.total <= USABLE_SHARE * capacities[device] for device, peak in each.peaks.items())
    assert len({each.plan for each in found}) == 10
    assert best_plans(some, 10)[0].plan == found[0].plan


def test_runners_up_have_other_layouts_and_say_why_they_are_worse():
    search = plan_search(setting(), runners_up=4)
    trained = ("actor.generation", "actor.training", "critic.training")
    layouts = [tuple(each.plan[name].layout for name in trained) for each in (search.best, *search.runners_up)]
    assert len(set(layouts)) == 5
    for each in search.runners_up:
        assert each.why.startswith("+") and (" longer" in each.why or " as fast" in each.why)
        assert each.step_s >= search.best.step_s


def test_plans_that_would_be_faster_are_refused_with_numbers():
    some = setting()
    search = plan_search(some)
    assert search.infeasible
    for plan, why in search.infeasible:
        assert refit_plan(plan, some) is None
        assert "GiB on device" in why and "57.6 GiB are usable" in why


def test_given_layouts_are_kept_and_dp_follows_the_devices():
    layouts = {name: stage.layout for name, stage in best_plans(setting(16), 1)[0].plan.items()}
    [more] = best_with(setting(32), layouts)
    assert {name: stage.layout for name, stage in more.plan.items()} == layouts
    assert len(more.plan.devices) > 16
    assert best_with(setting(2), layouts) == []


def test_degrees_of_the_plan_in_force_are_tried_on_many_devices():
    odd = best_with(setting(24), dict.fromkeys(setting().job.specs, Layout(3, 1)) | {
        "actor.training": Layout(3, 2), "critic.training": Layout(3, 2)})[0].plan  # fmt: skip
    assert Layout(3, 1) not in layouts_for(SPEC, 24)
    assert {Layout(3, 1), Layout(3, 2), Layout(3, 4)} <= set(
        layouts_for(SPEC, 24, [stage.layout for _, stage in odd.items()])
    )


def test_a_refitted_plan_stays_where_it_is_and_copes_with_longer_responses():
    plan = best_plans(setting(16, 1000.0), 1)[0].plan
    longer = refit_plan(plan, setting(16, 2000.0))
    assert longer is not None and longer.plan != plan
    places = [(s.dp, s.layout, s.devices) for _, s in plan.items()]
    assert [(s.dp, s.layout, s.devices) for _, s in longer.plan.items()] == places
    assert refit_plan(plan, setting(16, 60_000.0)) is None


def test_a_much_slower_device_is_left_out():
    some = setting(17, critic=False)
    slow = replace(some, efficiencies=replace(CONSERVATIVE, device_factor={3: 4.0}))
    plain = best_plans(some, 1)[0]
    around = best_plans(slow, 1)[0]
    assert 3 not in around.plan.devices
    assert around.step_s < 1.5 * plain.step_s


def test_measured_peaks_above_the_predicted_ones_leave_less_room():
    assert best_plans(setting(), 1)[0].step_s < best_plans(setting(memory_factor=1.2), 1)[0].step_s


def test_where_nothing_fits_the_sentence_has_the_numbers():
    assert best_plans(setting(2), 3) == []
    with pytest.raises(ValueError, match=r"No plan fits 2 devices of 64\.0 GiB .* GiB on device 0 .* use more devices"):
        plan_search(setting(2))
