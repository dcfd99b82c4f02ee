"""What the controller asks of planner, cost model and transition prices, answered by the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nereus.cluster import Cluster
from nereus.controller.decision import Boundary, Candidate
from nereus.cost.efficiency import Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.memory import estimate_memory, fits
from nereus.cost.operations import Operations
from nereus.cost.step import JobSpec, step_operations
from nereus.plan import Plan
from nereus.planner import Setting, best_plans, best_with, refit_plan
from nereus.planner.fit import Fitter
from nereus.planner.refit import places_of
from nereus.transition.price import TransitionPrice, TransitionPricer
from nereus.transition.primitives import TransportChoice

# Plans beyond the best that are weighed at a replan: slightly slower ones whose moves may be cheaper.
RUNNERS_UP = 7


class CostPlanning:
    """The planner's answers for one job."""

    def __init__(
        self,
        job: JobSpec,
        cluster: Cluster,
        *,
        runners_up: int = RUNNERS_UP,
        transport: TransportChoice = "auto",
        committed: bool = True,
    ) -> None:
        """Remember what stays the same.

        Args:
            cluster: the whole allocation, devices that are away included.
            transport: how the job moves.
            committed: whether every boundary has a commit, or a pending one.
        """
        self._job, self._count = job, 1 + runners_up
        self._transport: TransportChoice = transport
        self._committed = committed
        self._pricer = TransitionPricer(job, cluster)

    def search(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan | None) -> Sequence[Candidate]:
        """Return the best plan and its runners-up, fastest first; none when nothing fits."""
        if not boundary.cluster.devices:
            return []
        found = best_plans(self._setting(boundary, efficiencies), self._count, current=current)
        return [Candidate(each.plan, each.step_s) for each in found]

    def scale(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan) -> Sequence[Candidate]:
        """Return the best plan with the current tp and pp at any dp; none when nothing fits."""
        if not boundary.cluster.devices:
            return []
        layouts = {name: stage.layout for name, stage in current.items()}
        found = best_with(self._setting(boundary, efficiencies), layouts)
        return [Candidate(each.plan, each.step_s) for each in found]

    def refit(self, boundary: Boundary, efficiencies: Efficiencies, plan: Plan) -> Candidate | None:
        """Return the plan with micro-batch and recomputation picked anew; None when no choice fits."""
        found = refit_plan(plan, self._setting(boundary, efficiencies))
        return None if found is None else Candidate(found.plan, found.step_s)

    def fits(self, boundary: Boundary, plan: Plan) -> bool:
        """Return whether memory takes a plan as it is, micro-batches and recomputation included."""
        cluster, job = boundary.cluster, self._job
        capacities = {device: int(held / boundary.memory_factor) for device, held in cluster.capacities.items()}
        return fits(plan, job.specs, boundary.workload, job.precision, capacities)

    def refit_all(
        self, boundary: Boundary, efficiencies: Efficiencies, plans: Sequence[Plan]
    ) -> list[Candidate | None]:
        """Return what `refit` says of many plans, in a fraction of the time."""
        setting = self._setting(boundary, efficiencies)
        fitter = Fitter(setting)
        fitted = [fitter.fit(places_of(plan, setting)) for plan in plans]
        return [
            None if one is None else Candidate(one.plan(setting), one.work_s + efficiencies.step_s) for one in fitted
        ]

    def price(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan, target: Plan) -> TransitionPrice:
        """Return what the move from one plan to another costs."""
        lost, committed = boundary.lost, self._committed
        price = self._pricer.estimate(current, target, efficiencies, lost=lost, committed=committed)
        return price.only(self._transport)

    def describe_misfit(self, boundary: Boundary) -> str:
        """Return one sentence for people when no plan fits."""
        cluster = boundary.cluster
        gib = cluster.kind.memory_bytes / 2**30
        return (
            f"No plan fits {len(cluster.devices)} devices of {gib:.0f} GiB with responses of "
            f"{boundary.memory_tokens:.0f} tokens; use more devices, a smaller model or shorter responses."
        )

    def _setting(self, boundary: Boundary, efficiencies: Efficiencies) -> Setting:
        job = replace(self._job, load=boundary.load)
        return Setting(job, boundary.cluster, efficiencies, boundary.workload, boundary.memory_factor)


@dataclass
class CostPredictor:
    """What the cost model says of a step that has been measured.

    Attributes:
        accelerator: whether devices have memory of their own.
        prompt_margin_tokens: by how much the longest prompt is longer than the mean one.
    """

    job: JobSpec
    accelerator: bool = True
    prompt_margin_tokens: float = 0.0

    def operations(self, plan: Plan, load: StepLoad, cluster: Cluster) -> dict[str, Operations]:
        return step_operations(plan, replace(self.job, load=load), cluster)

    def peaks(self, plan: Plan, load: StepLoad) -> dict[int, int]:
        # Where single lengths are known, samples have prompts of mean length: what is likely, not what must fit.
        drawn = load.response_tokens_longest is not None
        longest = load.longest_tokens + (0.0 if drawn else self.prompt_margin_tokens)
        workload = load.memory_workload(longest, accelerator=self.accelerator, drawn=drawn)
        peaks = estimate_memory(plan, self.job.specs, workload, self.job.precision)
        return {device: peak.total for device, peak in peaks.items()}
