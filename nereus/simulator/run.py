"""One policy in a world: the shipped control loop over the executor in virtual time."""

from __future__ import annotations

from nereus.controller.adaptation import Adaptation
from nereus.controller.controller import Controller, Settings
from nereus.controller.decision import Boundary, NoPlanError
from nereus.controller.loop import ControlLoop
from nereus.controller.monitor import Thresholds
from nereus.controller.planning import CostPlanning, CostPredictor
from nereus.cost.calibration import Calibration
from nereus.plan import Plan
from nereus.simulator.executor import SimulatedExecutor
from nereus.simulator.oracle import BEST_PLANS
from nereus.simulator.result import PolicyRun
from nereus.simulator.world import World, first_devices


def settings_of(world: World, policy: str) -> Settings:
    scenario = world.scenario
    return Settings(policy, scenario.gamma, scenario.every, Thresholds(length=scenario.delta_length))


def run_policy(world: World, policy: str) -> PolicyRun:
    """Return what a policy comes to in a world.

    Raises:
        NoPlanError: no plan fits the devices of step 0.
    """
    planning, calibration = CostPlanning(world.job(0), world.cluster), Calibration()
    boundary = first_boundary(world, calibration)
    best = planning.search(boundary, calibration.efficiencies(), None)
    if not best:
        raise NoPlanError(planning.describe_misfit(boundary))
    return _run(world, policy, Controller(best[0].plan, planning, settings_of(world, policy)), calibration)


def run_static(world: World, plan: Plan) -> PolicyRun:
    """Return what keeping one plan comes to, under the same eyes: micro-batches are picked from what was measured."""
    planning = CostPlanning(world.job(0), world.cluster)
    return _run(world, "static", Controller(plan, planning, Settings(enabled=False)), Calibration())


def _run(world: World, policy: str, controller: Controller, calibration: Calibration) -> PolicyRun:
    executor = SimulatedExecutor(world)
    adaptation = Adaptation(
        controller,
        calibration,
        CostPredictor(world.job(0)),
        world.load(0),
        world.scenario.workload.max_response_tokens,
    )
    ended_by = ControlLoop(adaptation, executor).run(world.scenario.steps)
    return PolicyRun(
        policy,
        tuple(executor.spent),
        tuple(decision.to_record() for decision in controller.decisions),
        tuple(adaptation.warnings),
        ended_by,
    )


def best_plans_of(world: World) -> CostPlanning:
    """Return a planning that answers with as many plans as the oracle looks at."""
    return CostPlanning(world.job(0), world.cluster, runners_up=BEST_PLANS - 1)


def first_boundary(world: World, calibration: Calibration) -> Boundary:
    """Return what a policy knows before step 0: the devices, and the lengths of the model as it is."""
    load = world.load(0)
    cluster = first_devices(world.cluster, world.num_devices(0))
    return Boundary(0, cluster, load, load.response_tokens_p95, memory_factor=calibration.memory.factor())
