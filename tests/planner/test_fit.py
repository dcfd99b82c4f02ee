"""Micro-batches and recomputation of a placed plan: as fast as any choice that the memory model lets pass."""

import itertools
import random
from dataclasses import replace

import pytest

from nereus.cost.memory import USABLE_SHARE, estimate_memory, kv_slots
from nereus.cost.step import estimate_step
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan, stage_of
from nereus.planner.refit import refit_plan
from nereus.planner.setting import Setting
from tests.planner.instances import random_setting


def choices(name: str, stage: StagePlan, setting: Setting) -> list[StagePlan]:
    """Return a model-stage with every micro-batch and recomputation of the plan space."""
    most = setting.job.most_micro_batch or setting.workload.samples_per_step
    first = min(most, -(-setting.workload.share(name, stage.dp) // stage.layout.pp))
    sizes = sorted({-(-first // 2**k) for k in range(first.bit_length() + 1)}, reverse=True)
    both = (False, True) if stage_of(name) == "training" else (False,)
    return [replace(stage, micro_batch=size, recompute=flag) for size in sizes for flag in both]


def fits(plan: Plan, setting: Setting) -> bool:
    peaks = estimate_memory(plan, setting.job.specs, setting.workload, setting.job.precision)
    usable = {device: int(n * USABLE_SHARE / setting.memory_factor) for device, n in setting.cluster.capacities.items()}
    return all(peak.total <= usable[device] for device, peak in peaks.items())


def best_choices(plan: Plan, setting: Setting) -> tuple[float, Plan] | None:
    """Return the fastest choices for placed model-stages by trying them all, one whole plan after the other."""
    capacities = {d: int(n / setting.memory_factor) for d, n in setting.cluster.capacities.items()}
    slots = kv_slots(plan, setting.job.specs, setting.workload, setting.job.precision, capacities)
    if slots == 0:
        return None
    plan = plan.with_stage("actor.generation", micro_batch=slots)
    names = [name for name in plan if stage_of(name) != "generation"]
    found = []
    for picks in itertools.product(*(choices(name, plan[name], setting) for name in names)):
        tried = Plan.of({**dict(plan.items()), **dict(zip(names, picks, strict=True))})
        if fits(tried, setting):
            found.append((estimate_step(tried, setting.job, setting.cluster, setting.efficiencies).total_s, tried))
    return min(found, key=lambda item: item[0], default=None)


def random_plan(setting: Setting, draw: random.Random) -> Plan:
    """Return model-stages on random devices in random order."""
    devices, stages = setting.cluster.device_ids, {}
    for name, spec in setting.job.specs.items():
        most = setting.workload.smallest_minibatch_samples if stage_of(name) == "training" else 5
        layouts = [
            Layout(tp, pp)
            for tp in range(1, spec.kv_heads + 1)
            for pp in range(1, spec.layers + 1)
            if tp * pp <= len(devices)
        ]
        layout = draw.choice(layouts)
        dp = draw.randint(1, min(most, len(devices) // layout.size))
        stages[name] = StagePlan(dp, layout, tuple(draw.sample(devices, dp * layout.size)), 1)
    return Plan.of(stages)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_choice_is_faster_and_none_fits_where_none_is_found(seed: int):
    setting = random_setting(seed, most_devices=4)
    plan = random_plan(setting, random.Random(seed))
    expected, found = best_choices(plan, setting), refit_plan(plan, setting)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.step_s == pytest.approx(expected[0], rel=1e-12)
    assert found.cost.total_s == pytest.approx(found.step_s, rel=1e-12)
    assert fits(found.plan, setting)
    places = {name: (s.dp, s.layout, s.devices) for name, s in found.plan.items()}
    assert places == {name: (s.dp, s.layout, s.devices) for name, s in plan.items()}
