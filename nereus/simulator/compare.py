"""All policies of a scenario side by side, and the document of `nereus simulate --json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nereus.simulator.oracle import gaps_to_best, run_oracle, survey_plans
from nereus.simulator.result import PolicyRun
from nereus.simulator.run import best_plans_of, run_policy
from nereus.simulator.scenario import Scenario
from nereus.simulator.world import World, build_world

# Where the oracle doesn't run, the best plan is looked up at so many steps, spread evenly.
SAMPLED_STEPS = 20


@dataclass(frozen=True)
class Comparison:
    """The runs of a scenario's policies, in the order asked for; `oracle` is among them where it ran."""

    world: World
    runs: tuple[PolicyRun, ...]

    def __getitem__(self, policy: str) -> PolicyRun:
        return next(run for run in self.runs if run.policy == policy)

    def get(self, policy: str) -> PolicyRun | None:
        """Return the run of a policy; None where it wasn't asked for."""
        return next((run for run in self.runs if run.policy == policy), None)

    def to_record(self) -> dict[str, Any]:
        """Return the document of `nereus simulate --json`."""
        return {
            "policies": {run.policy: run.to_record(self.get("oracle")) for run in self.runs},
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
    runs = _judge(world, runs, with_oracle="oracle" in names)
    return Comparison(world, tuple(sorted(runs, key=lambda run: names.index(run.policy))))


def _judge(world: World, runs: list[PolicyRun], *, with_oracle: bool) -> list[PolicyRun]:
    """Return the runs with their gaps to the best plan of each step, and the oracle's where it is wanted."""
    num_steps = world.scenario.steps
    stride = 1 if with_oracle else -(-num_steps // SAMPLED_STEPS)
    steps = range(0, num_steps, stride)
    landscape = survey_plans(world, best_plans_of(world), runs, steps)
    if with_oracle:
        runs = [*runs, run_oracle(world, landscape)]
    rows = {step: row for row, step in enumerate(steps)}
    return [replace(run, gaps=gaps_to_best(world, run, landscape, rows)) for run in runs]
