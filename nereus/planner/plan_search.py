"""The planner's questions: the best plan, the best few, and the best one with some layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nereus.layout import Layout
from nereus.plan import Plan
from nereus.planner.candidate import Candidate, Search
from nereus.planner.fit import Fitted
from nereus.planner.search import find_plans
from nereus.planner.setting import Setting
from nereus.planner.space import layouts_for


def plan_search(setting: Setting, *, current: Plan | None = None, runners_up: int = 5) -> Search:
    """Return the best plan, its runners-up, and why faster ones don't fit.

    Args:
        current: the plan in force; its tp and pp are tried even where they are no powers of two.
        runners_up: how many, at most.

    Raises:
        ValueError: no plan fits memory.
    """
    plans = best_plans(setting, 1 + runners_up, current=current)
    if not plans:
        raise ValueError("no plan fits")
    return Search(plans[0], tuple(plans[1:]))


def best_plans(setting: Setting, count: int, *, current: Plan | None = None) -> list[Candidate]:
    """Return the `count` fastest plans that fit, fastest first, fewer if there are no more."""
    also = [stage.layout for _, stage in current.items()] if current else []
    layouts = {name: layouts_for(spec, len(setting.order), also) for name, spec in setting.job.specs.items()}
    return _candidates(setting, layouts, count)


def best_with(setting: Setting, layouts: Mapping[str, Layout], count: int = 1) -> list[Candidate]:
    """Return the fastest plans whose model-stages have the given layouts, at any dp; none where nothing fits."""
    num = len(setting.order)
    return _candidates(setting, {name: (each,) if each.size <= num else () for name, each in layouts.items()}, count)


def _candidates(setting: Setting, layouts: Mapping[str, tuple[Layout, ...]], count: int) -> list[Candidate]:
    found: list[tuple[Fitted, Setting]] = []
    for some in without_slow_devices(setting):
        found += [(fitted, some) for fitted in find_plans(some, layouts, count)]
    found.sort(key=lambda item: item[0].total_s)
    return [Candidate(fitted.plan(some), fitted.total_s, setting) for fitted, some in found[:count]]


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
