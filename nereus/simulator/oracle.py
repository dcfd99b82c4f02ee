"""The oracle: the best series of plans with the future known, by dynamic programming over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.cluster import NodeKind
from nereus.controller.decision import Boundary
from nereus.controller.planning import CostPlanning
from nereus.plan import Plan
from nereus.simulator.executor import NoiseOfStep, Spent, true_seconds
from nereus.simulator.result import PolicyRun
from nereus.simulator.step import step_latency
from nereus.simulator.true_times import TrueTimes
from nereus.simulator.world import World, first_devices
from nereus.transition.price import TransitionPricer, changes_layout, moves_state

# Best plans of each step that the oracle may use besides those that some policy visited.
BEST_PLANS = 50


@dataclass(frozen=True)
class Landscape:
    """Every plan that is looked at, and what each step costs under each.

    Attributes:
        plans: distinct placements.
        refitted: [step][plan] the plan with micro-batch and recomputation picked for the step; None where it can't run.
        latency_s: float64 [steps, plans], noise-free; infinite where the plan can't run.
        noisy_s: the same with the noise that the policies met.
    """

    plans: tuple[Plan, ...]
    refitted: tuple[tuple[Plan | None, ...], ...]
    latency_s: np.ndarray
    noisy_s: np.ndarray

    def static_totals_s(self) -> np.ndarray:
        """Return float64 [plans]: the total of keeping each plan from first to last step; infinite if it can't be kept.

        Micro-batch and recomputation are picked anew at every step, and the noise is the policies'.
        """
        return self.noisy_s.sum(axis=0)

    def best_s(self, step: int) -> float:
        """Return the noise-free latency of the best feasible plan of a step."""
        return float(self.latency_s[step].min())


def true_boundary(world: World, step: int) -> Boundary:
    """Return a boundary at which everything about the step is known."""
    load, cluster = world.load(step), first_devices(world.true_cluster(step), world.num_devices(step))
    factor = world.scenario.truth.memory_factor
    return Boundary(step, cluster, load, load.response_tokens_p95, memory_factor=factor)


def survey_plans(world: World, planning: CostPlanning, runs: Sequence[PolicyRun], steps: Sequence[int]) -> Landscape:
    """Return the landscape over the plans that the policies visited and the best ones of each step.

    Args:
        planning: answers with the best plans under given efficiencies.
        steps: the steps to look at.
    """
    found: dict[object, Plan] = {}
    visited: dict[int, list[Plan]] = {}
    for run in runs:
        for spent in run.spent:
            if spent.kind == "step":
                visited.setdefault(spent.step, []).append(spent.plan)
                found.setdefault(_placement(spent.plan), spent.plan)
    # Steps with the same devices, load and hardware have the same plans.
    alike = {world.conditions(step): true_boundary(world, step) for step in reversed(steps)}
    for boundary in alike.values():
        for candidate in planning.search(boundary, world.efficiencies(boundary.step), None):
            found.setdefault(_placement(candidate.plan), candidate.plan)
    plans = tuple(found.values())
    # What a plan that stays where it is can do depends on load and hardware, not on the devices beside it.
    rows = {world.work(step): step for step in reversed(steps)}
    fitted = {work: _refit(world, planning, step, plans) for work, step in rows.items()}
    index = {placement: i for i, placement in enumerate(found)}
    refitted = []
    for step in steps:
        there = set(first_devices(world.cluster, world.num_devices(step)).device_ids)
        row = [plan if plan and there.issuperset(plan.devices) else None for plan in fitted[world.work(step)]]
        for plan in visited.get(step, ()):  # what ran could run
            row[index[_placement(plan)]] = row[index[_placement(plan)]] or plan
        refitted.append(row)
    return _measure(world, plans, refitted, steps)


def _placement(plan: Plan) -> object:
    return tuple((name, stage.layout, stage.devices) for name, stage in plan.items())


def _refit(world: World, planning: CostPlanning, step: int, plans: Sequence[Plan]) -> list[Plan | None]:
    """Return the plans as they run best in a step if all devices are there; None where memory is too small."""
    boundary = replace(true_boundary(world, step), cluster=world.true_cluster(step))
    found = planning.refit_all(boundary, world.efficiencies(step), plans)
    return [None if candidate is None else candidate.plan for candidate in found]


def _measure(
    world: World, plans: tuple[Plan, ...], refitted: Sequence[Sequence[Plan | None]], steps: Sequence[int]
) -> Landscape:
    exact = np.full((len(steps), len(plans)), np.inf)
    noisy = exact.copy()
    times = TrueTimes(world)
    for row, step in enumerate(steps):
        noise = NoiseOfStep(world, step)
        columns = [column for column, plan in enumerate(refitted[row]) if plan is not None]
        runnable = [plan for plan in refitted[row] if plan is not None]
        for column, plan, seconds in zip(columns, runnable, times.of(step, runnable), strict=True):
            exact[row, column] = step_latency(plan, seconds)
            noisy[row, column] = step_latency(plan, noise.applied_to(seconds))
    return Landscape(plans, tuple(tuple(row) for row in refitted), exact, noisy)


def run_oracle(world: World, landscape: Landscape) -> PolicyRun:
    """Return the series of plans with the least total time over the plans of a landscape of all steps."""
    prices = price_matrices(world, landscape.plans)
    num_steps = len(landscape.latency_s)
    # best[s][p]: least total of the steps up to s that ends on plan p; came_from: the plan before it.
    best, came_from = [landscape.noisy_s[0]], [np.zeros(len(landscape.plans), dtype=int)]
    for step in range(1, num_steps):
        totals = best[-1][:, None] + prices[step]
        reached = totals.min(axis=0) + landscape.noisy_s[step]
        if not np.isfinite(reached).any():
            break
        came_from.append(totals.argmin(axis=0))
        best.append(reached)
    columns = [int(best[-1].argmin())]
    for before in reversed(came_from[1:]):
        columns.append(int(before[columns[-1]]))
    return PolicyRun("oracle", tuple(_account(landscape, prices, columns[::-1])))


def _account(landscape: Landscape, prices: Sequence[np.ndarray], columns: Sequence[int]) -> list[Spent]:
    spent: list[Spent] = []
    for step, column in enumerate(columns):
        plan = landscape.refitted[step][column]
        assert plan is not None
        previous = columns[step - 1] if step else column
        if moves_state(landscape.plans[previous], landscape.plans[column]):
            is_layout = changes_layout(landscape.plans[previous], landscape.plans[column])
            spent.append(Spent(step, "transition", float(prices[step][previous, column]), plan, is_layout))
        spent.append(Spent(step, "step", float(landscape.noisy_s[step, column]), plan))
    return spent


def price_matrices(world: World, plans: Sequence[Plan]) -> list[np.ndarray]:
    """Return by step float64 [plans, plans]: the true seconds of moving from each plan to each other."""
    known: dict[NodeKind, np.ndarray] = {}
    for step in range(world.scenario.steps):
        cluster = world.true_cluster(step)
        if cluster.kind not in known:
            pricer = TransitionPricer(world.job(step), cluster)
            known[cluster.kind] = pricer.estimate_all(plans, world.efficiencies(step))
    return [known[world.true_cluster(step).kind] for step in range(world.scenario.steps)]


def gaps_to_best(world: World, run: PolicyRun, landscape: Landscape, steps: Mapping[int, int]) -> tuple[float, ...]:
    """Return L(plan) / L(best feasible plan) - 1 of a run's finished steps, noise-free.

    Args:
        steps: the landscape's row of each step that it covers.
    """
    gaps = []
    for spent in run.spent:
        if spent.kind == "step" and spent.step in steps:
            latency = step_latency(spent.plan, true_seconds(world, spent.step, spent.plan))
            gaps.append(latency / landscape.best_s(steps[spent.step]) - 1.0)
    return tuple(gaps)
