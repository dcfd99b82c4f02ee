"""The simulated world: the job, and what its hardware really does, which no policy is told."""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from nereus.catalog import cluster_preset
from nereus.cluster import Cluster, Link, NodeKind, uniform_cluster
from nereus.cost.efficiency import PUBLISHED, Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.step import JobSpec
from nereus.model.spec import Head, ModelSpec
from nereus.presets import model_preset, read_model
from nereus.simulator.load import Traces, load_traces
from nereus.simulator.scenario import ClusterSource, ModelSource, Scenario


@dataclass(frozen=True)
class World:
    """A scenario with everything looked up. Devices ids 0..n-1 are there when a trace says n."""

    scenario: Scenario
    traces: Traces
    cluster: Cluster
    specs: Mapping[str, ModelSpec]

    @cached_property
    def device_counts(self) -> tuple[int, ...]:
        """Devices by step. A step that finds none waits for the next ones; 0 when none come any more."""
        counts, later = [], 0
        for pool in reversed(self.traces.pools):
            later = pool.num_devices or later
            counts.append(later)
        return tuple(reversed(counts))

    def num_devices(self, step: int) -> int:
        return self.device_counts[step]

    def was_suspended(self, step: int) -> bool:
        """Return whether all devices were gone before a step, so that it goes on from staged state."""
        return self.traces.pools[step].num_devices == 0

    def load(self, step: int) -> StepLoad:
        """Return the true load of a step."""
        workload, lengths = self.scenario.workload, self.traces.lengths
        cap = workload.max_response_tokens or math.inf
        mean = min(lengths.mean(step), cap)
        return StepLoad(
            samples=workload.prompts_per_step * workload.samples_per_prompt,
            minibatches=workload.minibatches,
            prompt_tokens=workload.prompt_tokens,
            response_tokens=mean,
            response_tokens_p95=max(mean, min(lengths.p95(step), cap)),
            epochs=workload.epochs,
            algorithm=workload.algorithm,
        )

    def share_at_cap(self, step: int) -> float:
        """Return the share of responses that the length cap cuts, if lengths are about normal."""
        cap, lengths = self.scenario.workload.max_response_tokens, self.traces.lengths
        if cap is None:
            return 0.0
        spread = max(1e-9, (lengths.p95(step) - lengths.mean(step)) / 1.645)
        return 0.5 * math.erfc((cap - lengths.mean(step)) / (spread * math.sqrt(2)))

    def job(self, step: int) -> JobSpec:
        """Return the job with the true load of a step."""
        return JobSpec(self.specs, self.load(step), self.scenario.precision)

    def efficiencies(self, step: int) -> Efficiencies:
        """Return what the hardware really reaches in a step, slow devices included."""
        slow = {target: factor for target, factor in self._slow(step).items() if isinstance(target, int)}
        return replace(self._efficiencies, device_factor=slow)

    @cached_property
    def _efficiencies(self) -> Efficiencies:
        truth = self.scenario.truth
        return Efficiencies(
            {**PUBLISHED.efficiency, **truth.efficiency},
            {**PUBLISHED.latency_s, **truth.latency_s},
            PUBLISHED.host_s if truth.host_s is None else truth.host_s,
        )

    def true_cluster(self, step: int) -> Cluster:
        """Return the whole allocation with its links as slow as they really are."""
        slow = {target: factor for target, factor in self._slow(step).items() if isinstance(target, str)}
        if not slow:
            return self.cluster

        def slowed(name: str, link: Link) -> Link:
            factor = slow.get(name, 1.0)
            return Link(link.bandwidth_bytes_s / factor, link.latency_s * factor)

        kind = self.cluster.kind
        kind = replace(
            kind,
            intra_node=slowed("intra_node", kind.intra_node),
            inter_node=slowed("inter_node", kind.inter_node),
            storage=slowed("storage", kind.storage),
        )
        return replace(self.cluster, kind=kind)

    def conditions(self, step: int) -> Hashable:
        """Return what decides how plans do in a step; steps with equal conditions differ by noise only."""
        return (self.num_devices(step), self.work(step))

    def work(self, step: int) -> Hashable:
        """Return the conditions of a step but for how many devices there are."""
        return (self.load(step), tuple(sorted(self._slow(step).items(), key=str)))

    def noise(self, step: int, attempt: int, what: str) -> float:
        """Return the factor by which a time differs from the true one; equal for all policies."""
        truth = self.scenario.truth
        key = [truth.seed, step, attempt, zlib.crc32(what.encode())]
        return float(max(0.1, 1.0 + truth.noise * np.random.default_rng(key).standard_normal()))

    def noise_of_devices(self, step: int) -> dict[int, float]:
        """Return by device the factor by which the time of equal work differs from the true one."""
        draw = np.random.default_rng([self.scenario.truth.seed, step, 11])
        # A step has thousands of pieces of equal work: their mean scatters much less than one time does.
        factors = np.maximum(
            0.1, 1.0 + 0.1 * self.scenario.truth.noise * draw.standard_normal(len(self.cluster.devices))
        )
        return dict(zip(self.cluster.device_ids, factors.tolist(), strict=True))

    def moment_of_loss(self, step: int) -> float:
        """Return after what share of the step devices are lost that go without notice."""
        return float(np.random.default_rng([self.scenario.truth.seed, step, 7]).uniform(0.1, 0.9))

    def _slow(self, step: int) -> dict[int | str, float]:
        """Return how many times as long a device or link takes; a factor below 1 is a share of the speed."""
        entries = sorted((entry for entry in self.scenario.truth.slow if entry[0] <= step), key=lambda entry: entry[0])
        factors = {target: max(factor, 1.0 / factor) for _, target, factor in entries}
        return {target: factor for target, factor in factors.items() if factor != 1.0}


def build_world(scenario: Scenario) -> World:
    """Return the world of a scenario.

    Raises:
        ValueError: an unknown preset, a missing trace or one that makes no sense, or responses that no model can hold.
    """
    cluster = _build_cluster(scenario.cluster)
    traces = load_traces(scenario, len(cluster.devices))
    ids = set(cluster.device_ids)
    for _, target, _ in scenario.truth.slow:
        if isinstance(target, int) and target not in ids:
            raise ValueError(f"truth.slow names device {target}, but the cluster has {len(ids)}; name one of them.")
    world = World(scenario, traces, cluster, _build_specs(scenario))
    for step in range(scenario.steps):
        world.job(step).check_positions()
    return world


def _build_specs(scenario: Scenario) -> dict[str, ModelSpec]:
    def read(role: str, head: Head) -> ModelSpec:
        source: ModelSource = getattr(scenario, role) or scenario.model
        try:
            return read_model(source.path, head) if source.path else model_preset(str(source.preset), head)
        except ValueError as error:
            raise ValueError(f"{role}: {error}") from None

    actor, critic = read("model", "lm"), read("critic", "value")
    specs = {"actor.generation": actor, "actor.training": actor, "critic.training": critic}
    specs |= {"reference.inference": read("reference", "lm"), "reward.inference": read("reward", "score")}
    if scenario.workload.algorithm == "grpo":
        del specs["critic.training"]
    return specs


def _build_cluster(source: ClusterSource) -> Cluster:
    if source.preset is not None:
        return cluster_preset(source.preset, source.devices)
    numbers = source.by_hand
    assert source.devices is not None and source.memory_per_device is not None and source.devices_per_node is not None
    kind = NodeKind(
        name="by hand",
        devices=source.devices_per_node,
        memory_bytes=source.memory_per_device,
        # Float32 at half of the bfloat16 peak: the usual ratio of matrix units.
        peak_flops={"bfloat16": float(numbers["peak_flops"] or 0), "float32": float(numbers["peak_flops"] or 0) / 2},
        memory_bandwidth_bytes_s=float(numbers["memory_bytes_s"] or 0),
        intra_node=Link(float(numbers["intra_node_bytes_s"] or 0), 2e-6),
        inter_node=Link(float(numbers["inter_node_bytes_s"] or 0), 5e-6),
        storage=Link(float(numbers["storage_bytes_s"] or 0), 2e-3),
        accelerator=True,
    )
    return uniform_cluster(kind, source.devices)


@lru_cache(maxsize=8)
def first_devices(cluster: Cluster, num_devices: int) -> Cluster:
    """Return the cluster of the first devices of an allocation."""
    return cluster.only(cluster.device_ids[:num_devices])
