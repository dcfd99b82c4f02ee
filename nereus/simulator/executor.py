"""The executor in virtual time: it does to a simulated world what a job does to a real one, and measures the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.cluster import Cluster, NodeKind
from nereus.controller.adaptation import Surroundings
from nereus.controller.decision import Decision, StepOutcome
from nereus.cost.memory import estimate_memory
from nereus.cost.step import step_operations
from nereus.plan import Plan
from nereus.simulator.clock import Clock
from nereus.simulator.step import Loss, StepSimulation, step_latency
from nereus.simulator.world import World, first_devices
from nereus.transition.price import TransitionPricer

# A silent worker is taken for lost after this long.
DETECTION_S = 15.0


@dataclass(frozen=True)
class Spent:
    """Where virtual time went: a finished step, a step that broke off, or a transition."""

    step: int
    kind: str
    seconds: float
    plan: Plan
    changes_layout: bool = False


class SimulatedExecutor:
    """One policy's job in a world; `spent` is the account of its virtual time."""

    def __init__(self, world: World) -> None:
        self.clock = Clock()
        self.spent: list[Spent] = []
        self._world = world
        self._pricers: dict[NodeKind, TransitionPricer] = {}
        self._attempts: dict[int, int] = {}
        self._lost: frozenset[int] = frozenset()

    def look(self, step: int, plan: Plan) -> Surroundings:
        """Return the devices at the boundary before a step; a loss without notice shows only after it has happened."""
        if self._world.was_suspended(step) and not self._attempts.get(step):
            self._lost = frozenset(plan.devices)
        return Surroundings(self._present(step), self._lost)

    def apply(self, decision: Decision) -> float:
        """Move to the decision's plan at the true price, with noise."""
        step = decision.step
        pricer = self._pricer(step)
        price = pricer.estimate(decision.current, decision.plan, self._world.efficiencies(step), lost=self._lost)
        seconds = price.seconds * self._world.noise(step, self._attempts.get(step, 0), "transition")
        self._spend(step, "transition", seconds, decision.plan, decision.changes_layout)
        self._lost = frozenset()
        return seconds

    def _pricer(self, step: int) -> TransitionPricer:
        """Return the pricer for the links as they really are in a step."""
        cluster = self._world.true_cluster(step)
        if cluster.kind not in self._pricers:
            self._pricers[cluster.kind] = TransitionPricer(self._world.job(step), cluster)
        return self._pricers[cluster.kind]

    def run_step(self, step: int, plan: Plan) -> StepOutcome:
        """Run one step; it breaks off where memory runs out or devices vanish."""
        attempt = self._attempts.get(step, 0)
        self._attempts[step] = attempt + 1
        seconds = NoiseOfStep(self._world, step, attempt).applied_to(true_seconds(self._world, step, plan))
        peaks = self._true_peaks(step, plan)
        capacities = self._world.cluster.capacities
        full = {device: phase for device, (peak, phase) in peaks.items() if peak > capacities[device]}

        def overfull(key: str) -> tuple[int, ...]:
            name, phase = key.split("/")
            return tuple(device for device, at in full.items() if at == f"{phase} of {name}")

        run = StepSimulation(
            self.clock, plan, seconds, overfull=overfull, loss=self._next_loss(step, attempt, plan, seconds)
        ).run()
        if run.broken_by is not None:
            return self._broken(step, plan, run.seconds, run.devices, lost=run.broken_by == "lost devices",
                                was_training=run.was_training)  # fmt: skip
        self._spend(step, "step", run.seconds, plan)
        load = self._world.load(step)
        return StepOutcome(
            step=step,
            seconds=run.seconds,
            response_tokens=load.response_tokens,
            response_tokens_p95=load.response_tokens_p95,
            share_at_cap=self._world.share_at_cap(step),
            stages_s=seconds,
            equal_work_s=[self._equal_work(step, plan)],
            peak_bytes={device: peak for device, (peak, _) in peaks.items()},
        )

    def _broken(
        self, step: int, plan: Plan, seconds: float, devices: tuple[int, ...], *, lost: bool, was_training: bool
    ) -> StepOutcome:
        if lost:
            seconds += DETECTION_S
            self.clock.now += DETECTION_S
            # After its first update a step's start is in the last commit only, so all model-stages go back to that.
            self._lost = frozenset(plan.devices if was_training else devices)
        self._spend(step, "lost" if lost else "out of memory", seconds, plan)
        out_of_memory = () if lost else devices
        peaks = {device: self._world.cluster.capacities[device] for device in out_of_memory}
        return StepOutcome(step, seconds, completed=False, out_of_memory=out_of_memory, peak_bytes=peaks)

    def _equal_work(self, step: int, plan: Plan) -> dict[int, float]:
        """Return what equal work takes on each device of the plan, measured with noise."""
        noise = self._world.noise_of_devices(step)
        slow = self._world.efficiencies(step).device_factor
        return {device: slow.get(device, 1.0) * noise[device] for device in plan.devices}

    def _spend(self, step: int, kind: str, seconds: float, plan: Plan, changes_layout: bool = False) -> None:
        if kind == "transition":
            self.clock.now += seconds
        self.spent.append(Spent(step, kind, seconds, plan, changes_layout))

    def _present(self, step: int) -> Cluster:
        count = self._world.num_devices(step)
        pool = self._world.traces.pools[step]
        if pool.lost and step and not self._attempts.get(step):
            count = max(count, self._world.num_devices(step - 1))
        return first_devices(self._world.cluster, count)

    def _next_loss(self, step: int, attempt: int, plan: Plan, seconds: Mapping[str, float]) -> Loss | None:
        if attempt or not step or not self._world.traces.pools[step].lost:
            return None
        before, after = self._world.num_devices(step - 1), self._world.num_devices(step)
        gone = frozenset(self._world.cluster.device_ids[after:before])
        return Loss(gone, self._world.moment_of_loss(step) * step_latency(plan, seconds)) if gone else None

    def _true_peaks(self, step: int, plan: Plan) -> dict[int, tuple[float, str]]:
        """Return the true peak of every device in bytes, and the phase in which it is."""
        workload = self._world.load(step).memory_workload()
        peaks = estimate_memory(plan, self._world.specs, workload, self._world.scenario.precision)
        factor = self._world.scenario.truth.memory_factor
        return {device: (factor * peak.total, peak.phase) for device, peak in peaks.items()}


def true_seconds(world: World, step: int, plan: Plan) -> dict[str, float]:
    """Return what every task of a step really takes under a plan, without noise."""
    efficiencies, result = world.efficiencies(step), {}
    for key, operations in step_operations(plan, world.job(step), world.true_cluster(step)).items():
        name = key.split("/")[0]
        slowdown = efficiencies.slowdown(plan[name].devices) if name in plan else 1.0
        result[key] = float(operations.total_s(efficiencies, slowdown))
    return result


class NoiseOfStep:
    """The noise of one attempt at a step: by task, the same for all policies and plans."""

    def __init__(self, world: World, step: int, attempt: int = 0) -> None:
        self._world, self._step, self._attempt = world, step, attempt
        self._factors: dict[str, float] = {}

    def applied_to(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of tasks with noise."""
        for key in seconds:
            if key not in self._factors:
                self._factors[key] = self._world.noise(self._step, self._attempt, key)
        return {key: duration * self._factors[key] for key, duration in seconds.items()}
