"""All policies of a scenario side by side, and the document of `nereus simulate --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nereus.plan import Plan
from nereus.simulator.oracle import Landscape, gaps_to_best, run_oracle, survey_plans
from nereus.simulator.result import PolicyRun
from nereus.simulator.run import best_plans_of, run_policy, run_static
from nereus.simulator.scenario import Scenario
from nereus.simulator.world import World, build_world

# Where the oracle doesn't run, the best plan is looked up at so many steps, spread evenly.
SAMPLED_STEPS = 20
# Plans that are tried as static ones.
STATIC_PLANS = 20


@dataclass(frozen=True)
class Comparison:
    """The runs of a scenario's policies, in the order asked for; `oracle` is among them where it ran."""

    world: World
    runs: tuple[PolicyRun, ...]
    landscape: Landscape

    def __getitem__(self, policy: str) -> PolicyRun:
        return next(run for run in self.runs if run.policy == policy)

    def get(self, policy: str) -> PolicyRun | None:
        """Return the run of a policy; None where it wasn't asked for."""
        return next((run for run in self.runs if run.policy == policy), None)

    @cached_property
    def best_static(self) -> tuple[Plan, float] | None:
        """The best plan that is kept from first to last step, and its total in seconds; None if none survives.

        The STATIC_PLANS best with the future known, of the oracle's plans, are run as policies are: with predictions
        that learn, and micro-batches picked by them.
        """
        if self.get("oracle") is None:
            return None
        totals = self.landscape.static_totals_s()
        best = [index for index in totals.argsort(kind="stable")[:STATIC_PLANS] if totals[index] < float("inf")]
        runs = [(self.landscape.plans[index], run_static(self.world, self.landscape.plans[index])) for index in best]
        survivors = [(plan, run.seconds()) for plan, run in runs if run.steps == self.world.scenario.steps]
        return min(survivors, key=lambda pair: pair[1], default=None)

    def to_record(self) -> dict[str, Any]:
        """Return the document of `nereus simulate --json`."""
        static = self.best_static
        return {
            "policies": {run.policy: run.to_record(self.get("oracle")) for run in self.runs},
            "best_static_plan": None if static is None else {"plan": static[0].to_record(), "total_s": static[1]},
            "devices": list(self.world.device_counts),
            "devices_source": self.world.traces.source,
            "response_tokens": [self.world.load(step).response_tokens for step in range(self.world.scenario.steps)],
        }


def simulate(
    scenario: Scenario,
    policies: Sequence[str] | None = None,
    *,
    each: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Return what the policies of a scenario come to.

    Args:
        policies: instead of the scenario's.
        each: called with the name of every policy before it runs.

    Raises:
        ValueError: the scenario makes no sense, or no plan fits at its first step.
    """
    world = build_world(scenario)
    names = list(dict.fromkeys(policies or scenario.policies))
    runs = []
    for name in names:
        if name != "oracle":
            each(name)
            runs.append(run_policy(world, name))
    if "oracle" in names:
        each("oracle")
    # Without the oracle some steps are enough: the best plan is only looked up for the gap to it.
    stride = 1 if "oracle" in names else -(-scenario.steps // SAMPLED_STEPS)
    steps = range(0, scenario.steps, stride)
    landscape = survey_plans(world, best_plans_of(world), runs, steps)
    if "oracle" in names:
        runs.append(run_oracle(world, landscape))
    rows = {step: row for row, step in enumerate(steps)}
    judged = [replace(run, gaps=gaps_to_best(world, run, landscape, rows)) for run in runs]
    return Comparison(world, tuple(sorted(judged, key=lambda run: names.index(run.policy))), landscape)
