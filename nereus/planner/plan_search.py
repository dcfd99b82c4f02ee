"""The planner's questions: the best plan, the best few, and the best one with some layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nereus.layout import Layout
from nereus.plan import Plan
from nereus.planner.candidate import Candidate, Search
from nereus.planner.explain import leanest, no_plan_message, why_misfit, why_worse
from nereus.planner.fit import Fitted
from nereus.planner.refit import refit_plan
from nereus.planner.search import find_plans
from nereus.planner.setting import Setting
from nereus.planner.space import layouts_for

# With predicted memory divided by this, memory is no matter.
_NO_MATTER = 1e6


def plan_search(setting: Setting, *, current: Plan | None = None, runners_up: int = 5, infeasible: int = 5) -> Search:
    """Return the best plan, its runners-up with the reason why each is worse, and why some faster ones don't fit.

    Runners-up differ from the best plan and from each other in some layout of training or generation.

    Args:
        current: the plan in force; its tp and pp are tried even where they are no powers of two.
        runners_up, infeasible: how many, at most.

    Raises:
        ValueError: no plan fits memory; the sentence has the numbers.
    """
    layouts = _layouts(setting, current)
    plans = _candidates(setting, layouts, 1 + runners_up, by_layouts=True)
    if not plans:
        raise ValueError(no_plan_message(setting, layouts))
    best = plans[0]
    worse = tuple(replace(each, why=why_worse(each, best)) for each in plans[1:])
    return Search(best, worse, tuple(_faster_misfits(setting, layouts, best, infeasible)))


def best_plans(
    setting: Setting, count: int, *, current: Plan | None = None, by_layouts: bool = False
) -> list[Candidate]:
    """Return the `count` fastest plans that fit, fastest first, fewer if there are no more.

    Args:
        by_layouts: of plans with the same layouts in training and generation return only the fastest.
    """
    return _candidates(setting, _layouts(setting, current), count, by_layouts=by_layouts)


def best_with(setting: Setting, layouts: Mapping[str, Layout], count: int = 1) -> list[Candidate]:
    """Return the fastest plans whose model-stages have the given layouts, at any dp; none where nothing fits."""
    num = len(setting.order)
    return _candidates(setting, {name: (each,) if each.size <= num else () for name, each in layouts.items()}, count)


def _layouts(setting: Setting, current: Plan | None) -> dict[str, tuple[Layout, ...]]:
    also = [stage.layout for _, stage in current.items()] if current else []
    return {name: layouts_for(spec, len(setting.order), also) for name, spec in setting.job.specs.items()}


def _candidates(
    setting: Setting, layouts: Mapping[str, tuple[Layout, ...]], count: int, *, by_layouts: bool = False
) -> list[Candidate]:
    found: list[tuple[Fitted, Setting]] = []
    for some in without_slow_devices(setting):
        found += [(fitted, some) for fitted in find_plans(some, layouts, count, by_layouts=by_layouts)]
    found.sort(key=lambda item: item[0].work_s)
    return [replace(Candidate.of(fitted, some), setting=setting) for fitted, some in found[:count]]


def without_slow_devices(setting: Setting) -> list[Setting]:
    """Return the setting, and those that leave out the devices that are slower than others by some factor.

    A block takes devices in their order, so a slow one in the middle can be avoided only by taking it away.
    """
    factors = setting.efficiencies.device_factor
    present = sorted({factors.get(device, 1.0) for device in setting.cluster.device_ids})
    result = [setting]
    for most in present[:-1]:
        fast = [device for device in setting.cluster.device_ids if factors.get(device, 1.0) <= most]
        result.append(replace(setting, cluster=setting.cluster.only(fast)))
    return result


def _faster_misfits(
    setting: Setting, layouts: Mapping[str, tuple[Layout, ...]], best: Candidate, count: int
) -> list[tuple[Plan, str]]:
    """Return plans that would be faster than the best one if memory were no matter, fastest first, with the reason."""
    if not count:
        return []
    unlimited = replace(setting, memory_factor=setting.memory_factor / _NO_MATTER)
    misfits = []
    for each in _candidates(unlimited, layouts, 2 * count, by_layouts=True):
        if each.step_s < best.step_s and refit_plan(each.plan, setting) is None:
            misfits.append((leanest(each.plan), f"{why_misfit(each.plan, setting)}; it would take {each.step_s:.1f} s"))
    return misfits[:count]
