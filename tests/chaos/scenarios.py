"""Transitions in which workers are struck: two plans each, how bytes move, and how much memory there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nereus.cluster import Link
from nereus.runtime.job import Job
from nereus.transition.memory import resident_bytes
from nereus.transition.speeds import Speeds
from tests.chaos.runs import STAGES
from tests.parity.runs import ODD_TINY

CHANGE = 2  # the step before which the plan changes
STEPS = 4
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "model": {"tiny": ODD_TINY},
    "rollout": {"prompts_per_step": 4, "max_prompt_tokens": 12, "max_response_tokens": 6},
    "ppo": {"minibatches": 2, "actor_lr": 3e-3, "critic_lr": 3e-3, "kl_adaptive": True, "kl_target": 0.1},
    "precision": "float64",
    "steps": STEPS,
    "seed": 5,
    "cluster": {"devices": 3, "memory_per_device": "2GiB"},
}
Plan = Mapping[str, Mapping[str, Any]]


def entry(dp: int, tp: int, pp: int, *devices: int) -> dict[str, Any]:
    return {"dp": dp, "tp": tp, "pp": pp, "devices": list(devices)}


def all_on(dp: int, tp: int, pp: int, *devices: int) -> dict[str, dict[str, Any]]:
    return {name: entry(dp, tp, pp, *devices) for name in STAGES}


@dataclass(frozen=True)
class Scenario:
    """One change of the plan.

    Attributes:
        before, after: the plans.
        transport: of the config.
        every: steps between two commits.
        slack_bytes: above what either plan holds on a device; None: there is memory enough.
        shard_s: each shard takes so long, so that a commit is pending.
        dear_links: links are so slow that `auto` reads from storage what lies there.
    """

    before: Plan
    after: Plan
    transport: str = "direct"
    every: int = 1
    slack_bytes: int | None = None
    shard_s: float = 0.0
    dear_links: bool = False

    def config(self, run_dir: str) -> dict[str, Any]:
        """Return the tree of the run's config."""
        return {
            **TREE,
            "plan": [[0, self.before], [CHANGE, self.after]],
            "transport": self.transport,
            "staging": {"every": self.every, "keep": 2, "lease_s": 2},
            "run_dir": run_dir,
        }

    def tighten(self, job: Job) -> Job:
        """Return the job with as little memory for the move as this scenario has."""
        if self.slack_bytes is None:
            return job
        memory, plans = job.transition_memory, [plan for _, plan in job.schedule]
        held = [resident_bytes(plan, memory, memory.usable_bytes) for plan in plans]
        usable = {device: max(part[device] for part in held) + self.slack_bytes for device in memory.usable_bytes}
        return replace(job, transition_memory=replace(memory, usable_bytes=usable))


def slow_links() -> Speeds:
    """Return speeds at which storage is the better way for what lies there already."""
    link, write, read = Link(1e6, 0.0), Link(1e5, 0.0), Link(2e6, 0.0)
    return Speeds(lambda device: 0, near=link, far=link, write=write, read=read, copy_bytes_s=1e9)


_MIXED = {
    "actor.generation": entry(2, 1, 1, 0, 1),
    "actor.training": entry(1, 2, 1, 0, 1),
    "critic.training": entry(1, 1, 2, 1, 0),
    "reference.inference": entry(1, 1, 1, 0),
}
_MIXED_AFTER = {
    "actor.generation": entry(1, 2, 1, 0, 1),
    "actor.training": entry(1, 1, 2, 0, 1),
    "critic.training": entry(2, 1, 1, 2, 1),
    "reference.inference": entry(1, 1, 1, 1),
}
SCENARIOS = {
    "split": Scenario(all_on(1, 2, 1, 0, 1), all_on(2, 1, 1, 0, 1)),
    "merge": Scenario(all_on(2, 1, 1, 0, 1), all_on(1, 2, 1, 1, 0), transport="auto"),
    "grow": Scenario(all_on(1, 1, 1, 0), all_on(2, 1, 1, 0, 1)),
    "move": Scenario(all_on(1, 2, 1, 0, 1), all_on(1, 2, 1, 1, 2)),
    "shrink": Scenario(all_on(2, 1, 1, 0, 1), all_on(1, 1, 1, 1)),
    "in place": Scenario(all_on(1, 2, 1, 0, 1), all_on(1, 1, 2, 0, 1), slack_bytes=2 << 20),
    "from a commit": Scenario(all_on(1, 1, 1, 0), all_on(1, 2, 1, 1, 2), transport="staged", shard_s=0.1),
    "own set": Scenario(all_on(1, 2, 1, 0, 1), all_on(1, 1, 2, 0, 1), transport="staged", every=3, slack_bytes=2 << 20),
    "mixed": Scenario(_MIXED, _MIXED_AFTER, transport="auto", every=3, dear_links=True),
}
