"""One policy in a world: the shipped control loop over the executor in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nereus.cluster import Cluster
from nereus.controller.controller import Controller, Settings
from nereus.controller.decision import Boundary, NoPlanError
from nereus.controller.loop import ControlLoop
from nereus.controller.monitor import Thresholds
from nereus.controller.planning import CostPlanning
from nereus.cost.calibration import Calibration
from nereus.cost.load import StepLoad
from nereus.cost.operations import Operations
from nereus.cost.step import JobSpec, step_operations
from nereus.plan import Plan
from nereus.simulator.executor import SimulatedExecutor
from nereus.simulator.peaks import PeakModel
from nereus.simulator.result import PolicyRun
from nereus.simulator.world import World, first_devices


@dataclass
class CostPredictor:
    """What the cost model says of a step that has been measured; the controller's nominal view of the cluster."""

    job: JobSpec
    peak_model: PeakModel

    def operations(self, plan: Plan, load: StepLoad, cluster: Cluster) -> dict[str, Operations]:
        return step_operations(plan, replace(self.job, load=load), cluster)

    def peaks(self, plan: Plan, load: StepLoad) -> dict[int, int]:
        return self.peak_model.peaks(plan, load.memory_workload())


def settings_of(world: World, policy: str) -> Settings:
    scenario = world.scenario
    return Settings(policy, scenario.gamma, scenario.every, Thresholds(length=scenario.delta_length))


def run_policy(world: World, policy: str, settings: Settings | None = None) -> PolicyRun:
    """Return what a policy comes to in a world.

    Raises:
        NoPlanError: no plan fits the devices of step 0.
    """
    planning = CostPlanning(world.job(0), world.cluster)
    calibration = Calibration()
    boundary = first_boundary(world, calibration)
    best = planning.search(boundary, calibration.efficiencies(), None)
    if not best:
        raise NoPlanError(planning.describe_misfit(boundary))
    controller = Controller(best[0].plan, planning, settings or settings_of(world, policy))
    executor = SimulatedExecutor(world)
    loop = ControlLoop(
        controller,
        calibration,
        executor,
        CostPredictor(world.job(0), PeakModel(world.specs, world.scenario.precision)),
        world.load(0),
        world.scenario.workload.max_response_tokens,
    )
    ended_by = loop.run(world.scenario.steps)
    return PolicyRun(
        policy,
        tuple(executor.spent),
        tuple(pool.num_devices for pool in world.traces.pools),
        tuple(decision.to_record() for decision in controller.decisions),
        tuple(loop.warnings),
        ended_by,
    )


def first_boundary(world: World, calibration: Calibration) -> Boundary:
    """Return what a policy knows before step 0: the devices, and the lengths of the model as it is."""
    load = world.load(0)
    cluster = first_devices(world.cluster, world.num_devices(0))
    return Boundary(0, cluster, load, load.response_tokens_p95, memory_factor=calibration.memory.factor())
