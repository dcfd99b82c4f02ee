"""What a job's control is made of: its cluster, its load before the first step, and the planner's answers for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nereus.cluster import Cluster, NodeKind, local_cluster
from nereus.config import RunConfig
from nereus.controller.adaptation import Adaptation
from nereus.controller.controller import Controller, Settings
from nereus.controller.decision import Boundary, Candidate
from nereus.controller.monitor import Thresholds
from nereus.controller.planning import CostPlanning, CostPredictor
from nereus.cost.calibration import Calibration
from nereus.cost.efficiency import Efficiencies, first_guess
from nereus.cost.load import StepLoad
from nereus.cost.step import JobSpec
from nereus.data import PromptTokens
from nereus.model.spec import ModelSpec
from nereus.plan import Plan
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import TransportChoice

# Before the first step nobody knows how long responses are: half the cap is as good a guess as any for times.
FIRST_SHARE_OF_CAP = 0.5


@dataclass(frozen=True)
class Frame:
    """What stays the same of a job while its plan changes.

    Attributes:
        spec: the job with the load before its first step.
        cluster: all its devices, those that are away included.
        cap_tokens: most tokens of a response.
        prompt_margin_tokens: by how much the longest prompt is longer than the mean one.
        transport: how state moves.
        commits_every_step: whether what is staged is there already when the plan changes.
        message_s: seconds of a small message between two devices; None: not measured.
    """

    spec: JobSpec
    cluster: Cluster
    cap_tokens: int
    prompt_margin_tokens: float
    transport: TransportChoice = "auto"
    commits_every_step: bool = True
    message_s: float | None = None

    @classmethod
    def of(
        cls,
        config: RunConfig,
        specs: Mapping[str, ModelSpec],
        prompts: Sequence[PromptTokens],
        capacities: Mapping[int, int],
        *,
        staging_buffer_bytes: int,
    ) -> Frame:
        """Return the frame of a checked config."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        mean, longest, cap = sum(lengths) / len(lengths), max(lengths), config.rollout.max_response_tokens
        load = StepLoad(
            samples=config.rollout.samples_per_step,
            minibatches=config.ppo.minibatches,
            prompt_tokens=mean,
            response_tokens=FIRST_SHARE_OF_CAP * cap,
            response_tokens_p95=float(cap),
            epochs=config.ppo.epochs,
            slot_tokens=longest + cap,
            staging_buffer_bytes=staging_buffer_bytes,
        )
        threads = config.cluster.threads_per_device
        cluster = local_cluster(len(capacities), min(capacities.values()), threads_per_device=threads)
        cluster = replace(cluster, kind=replace(cluster.kind, accelerator=config.cluster.device == "cuda"))
        commits_every_step = config.staging.every == 1
        return cls(
            JobSpec(
                specs,
                load,
                config.precision,
                staging=commits_every_step,
                most_micro_batch=config.ppo.most_micro_batch,
            ),
            cluster,
            cap,
            longest - mean,
            transport=config.transport,
            commits_every_step=commits_every_step,
        )

    def with_kind(self, kind: NodeKind) -> Frame:
        """Return the frame on machines as they were measured."""
        return replace(self, cluster=replace(self.cluster, kind=kind), message_s=kind.intra_node.latency_s)

    @cached_property
    def planning(self) -> CostPlanning:
        """The planner's answers for the job."""
        return FillablePlanning(self)

    def calibration(self) -> Calibration:
        """Return what is believed of the machines before a step was measured."""
        return Calibration(first_guess(accelerator=self.cluster.kind.accelerator, message_s=self.message_s))

    def boundary(self, step: int, memory_tokens: float, devices: Sequence[int] | None = None) -> Boundary:
        """Return what is known before the first step: the devices (None: all) and lengths that are guesses.

        Args:
            memory_tokens: the longest response that memory is predicted for.
        """
        cluster = self.cluster if devices is None else self.cluster.only(devices)
        return Boundary(step, cluster, self.spec.load, memory_tokens + self.prompt_margin_tokens)

    def begin(self, plan: Plan, config: RunConfig) -> Adaptation:
        """Return the control of a job that begins on a plan."""
        return self._adaptation(Controller(plan, self.planning, settings_of(config)), self.calibration())

    def go_on(self, record: Mapping[str, Any], config: RunConfig) -> Adaptation:
        """Return the control of a job that goes on, from what its staged state keeps."""
        controller = Controller.from_record(record["controller"], self.planning, settings_of(config))
        adaptation = self._adaptation(controller, Calibration.from_record(record["calibration"]))
        adaptation.go_on_from(record)
        return adaptation

    def _adaptation(self, controller: Controller, calibration: Calibration) -> Adaptation:
        predictor = CostPredictor(self.spec, self.cluster.kind.accelerator, self.prompt_margin_tokens)
        return Adaptation(
            controller,
            calibration,
            predictor,
            self.spec.load,
            cap_tokens=self.cap_tokens,
            prompt_margin_tokens=self.prompt_margin_tokens,
            cluster=self.cluster,
            first_memory_factor=1.0,  # a plan that has passed the door isn't doubted before anything was measured
        )


def corrected(capacities: Mapping[int, int], memory_factor: float) -> dict[int, int]:
    """Return what devices hold in bytes of uncorrected predictions, which are to be multiplied by the factor."""
    return {device: int(capacity / memory_factor) for device, capacity in capacities.items()}


def settings_of(config: RunConfig) -> Settings:
    """Return how a config lets the controller adapt."""
    adapt = config.adapt
    thresholds = Thresholds(length=adapt.delta_length)
    return Settings(adapt.policy, adapt.gamma, adapt.every, thresholds, enabled=adapt.enabled, may_change_layouts=True)


class FillablePlanning(CostPlanning):
    """The planner's answers that a job can go to: filling their units takes buffers beside what they hold."""

    def __init__(self, frame: Frame) -> None:
        super().__init__(frame.spec, frame.cluster, transport=frame.transport, committed=frame.commits_every_step)

    def search(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan | None) -> list[Candidate]:
        return self._admit(boundary, super().search(boundary, efficiencies, current))

    def scale(self, boundary: Boundary, efficiencies: Efficiencies, current: Plan) -> list[Candidate]:
        return self._admit(boundary, super().scale(boundary, efficiencies, current))

    def _admit(self, boundary: Boundary, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the plans whose units can be filled."""
        capacities = corrected(boundary.cluster.capacities, boundary.memory_factor)
        memory = TransitionMemory.of(self._job.specs, boundary.workload, self._job.precision, capacities)
        return [each for each in candidates if memory.takes(each.plan)]


def first_plan(frame: Frame, devices: Sequence[int] | None = None, *, may_grow: bool = False) -> Plan | None:
    """Return the planner's best plan before anything was measured, or None where no plan fits.

    Args:
        may_grow: whether responses as long as the cap may be left to a later plan, where none fits them now; else they
            must fit from the start.
    """
    planning, efficiencies, length = frame.planning, frame.calibration().efficiencies(), float(frame.cap_tokens)
    while length >= 1:
        found = planning.search(frame.boundary(0, length, devices), efficiencies, None)
        if found or not may_grow:
            return found[0].plan if found else None
        length /= 2
    return None
