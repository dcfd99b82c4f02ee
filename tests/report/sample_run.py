"""A made-up run that adapts, as its files hold it: responses grow, devices go from 2 to 1 and back, memory runs short.

Its story, by the start of steps: 0 two devices; 5 a faster plan is refused, it wouldn't pay back; 7 it is admitted, and
fails on the way; 8 it is tried again; 10 device 1 leaves; 14 nothing better; 17 the device is back, a move doesn't pay
yet; 19 it does; 24 memory is too small for the plan in force. `python -m tests.report.sample_run FOLDER` writes it.
"""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.config import dump_config, load_config
from nereus.controller.decision import Decision
from nereus.controller.monitor import LENGTH, MEMORY_VIOLATION, POOL, describe_cap
from nereus.controller.reasons import explain
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan
from nereus.transition.price import FREE, TransitionPrice, moves_state

STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")
CAP_TOKENS = 128
MIB = 1 << 20


def plan_of(generation: StagePlan, training: StagePlan, inference: StagePlan) -> Plan:
    return Plan.of(dict(zip(STAGES, (generation, training, training, inference), strict=True)))


def stage(dp: int, tp: int = 1, pp: int = 1, micro_batch: int = 8, recompute: bool = False) -> StagePlan:
    return StagePlan(dp, Layout(tp, pp), tuple(range(dp * tp * pp)), micro_batch, recompute)


FIRST = plan_of(stage(2), stage(2), stage(2))
LONGER = plan_of(stage(1, tp=2), stage(2), stage(2))
ALONE = plan_of(stage(1), stage(1, micro_batch=4), stage(1))
PIPED = plan_of(stage(2), stage(1, pp=2), stage(2))
TIGHT = plan_of(stage(2), stage(1, tp=2, micro_batch=2, recompute=True), stage(2))
# Seconds of generation, inference and training of a step at 32 tokens a response.
SECONDS = {FIRST: (1.3, 0.4, 0.9), LONGER: (0.6, 0.4, 0.9), ALONE: (1.6, 0.8, 1.8), PIPED: (0.8, 0.4, 0.9),
           TIGHT: (0.8, 0.4, 1.3)}  # fmt: skip


@dataclass
class SampleRun:
    """The lines of metrics.jsonl, decisions.jsonl and transitions.jsonl; `stretch` makes every step so many."""

    stretch: int = 1
    metrics: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    transitions: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._noise = random.Random(7)
        self._plan = FIRST
        moves = {
            5: lambda s: self._weigh(s, LENGTH, LONGER, seconds=1.2, verdict="refuse"),
            7: lambda s: self._weigh(s, LENGTH, LONGER, seconds=0.1, verdict="admit", outcome="rolled_back"),
            8: lambda s: self._move(s, LONGER, "committed"),
            10: lambda s: self._weigh(s, POOL, ALONE, seconds=0.3, verdict="urgent"),
            14: lambda s: self._weigh(s, LENGTH, ALONE, seconds=0.0, verdict="keep"),
            17: lambda s: self._weigh(s, POOL, PIPED, seconds=3.5, verdict="refuse"),
            19: lambda s: self._weigh(s, LENGTH, PIPED, seconds=0.8, verdict="admit"),
            24: lambda s: self._weigh(s, MEMORY_VIOLATION, TIGHT, seconds=0.4, verdict="urgent"),
        }
        for step in range(28 * self.stretch):
            act, first = divmod(step, self.stretch)
            if first == 0 and act in moves:
                moves[act](step)
            self._run(step)

    def devices_at(self, step: int) -> list[int]:
        return [0] if 10 <= step // self.stretch < 17 else [0, 1]

    def tokens_at(self, step: int) -> float:
        return 12 * 8 ** (step / (27 * self.stretch))

    def seconds_of(self, plan: Plan, step: int) -> list[float]:
        return [part * (0.3 + 0.7 * self.tokens_at(step) / 32) for part in SECONDS[plan]]

    def _weigh(
        self, step: int, trigger: str, candidate: Plan, *, seconds: float, verdict: str, outcome: str = "committed"
    ) -> None:
        now, then = sum(self.seconds_of(self._plan, step)), sum(self.seconds_of(candidate, step))
        gain = now - then
        urgent = verdict == "urgent"
        decision = Decision(
            step=step, trigger=(trigger,), current=self._plan, candidate=candidate, plan=candidate,
            latency_current_s=None if urgent else now, latency_candidate_s=then,
            price=TransitionPrice(seconds, 1.6 * seconds, 12 * MIB) if seconds else FREE,
            horizon_steps=4.0, payback_steps=0.0 if urgent else seconds / gain if gain > 0 else math.inf,
            verdict=verdict, reason="",  # type: ignore[arg-type]
        )  # fmt: skip
        decision.reason = explain(decision, "payback", 0.5)
        runs = self._plan if outcome != "committed" or verdict in ("refuse", "keep") else candidate
        decision.measured = {"latency_s": sum(self.seconds_of(runs, step)) * self._noise.uniform(0.94, 1.07)}
        if verdict in ("admit", "urgent"):
            self._move(step, candidate, outcome)
            decision.measured["transition_s"] = self.transitions[-1]["seconds"]
        self.decisions.append(decision.to_record())

    def _move(self, step: int, target: Plan, outcome: str) -> None:
        seconds = self._noise.uniform(0.15, 0.6)
        self.transitions.append({
            "step": step, "from": self._plan.to_record(), "to": target.to_record(), "seconds": seconds,
            "bytes": 12 * MIB, "verified": outcome == "committed", "outcome": outcome,
            "primitives": [{"id": "actor.generation/reshard/0", "kind": "reshard", "model_stage": "actor.generation",
                            "depends_on": [], "transport": "direct", "bytes": 12 * MIB, "seconds": seconds}],
        })  # fmt: skip
        assert moves_state(self._plan, target)
        if outcome == "committed":
            self._plan = target

    def _run(self, step: int) -> None:
        noise, tokens = self._noise, self.tokens_at(step)
        parts = [part * noise.uniform(0.94, 1.07) for part in self.seconds_of(self._plan, step)]
        seconds = dict(zip(("generation", "inference", "training"), parts, strict=True))
        seconds |= {"weight_sync": 0.05, "staging": 0.02, "orchestration": 0.1}
        seconds["transition"] = sum(line["seconds"] for line in self.transitions if line["step"] == step)
        seconds["total"] = sum(seconds.values())
        learned = min(1.0, step / (22 * self.stretch))
        devices = self.devices_at(step)
        fits = len(devices) == 2 and tokens < 60
        line = {
            "step": step, "policy_version": 2 * step, "reward_mean": 0.08 + 0.85 * learned + noise.uniform(-0.03, 0.03),
            "reward_std": 0.2 - 0.12 * learned, "kl_k1": 0.6 * learned**1.5, "kl_k3": 0.62 * learned**1.5,
            "kl_coef": 0.001, "clip_fraction": 0.05, "ratio_mean": 1.0, "first_ratio_max_error": 2e-7,
            "generation_logprob_gap_max": 6e-7, "value_loss": 0.08 / (1 + step), "explained_variance": 0.7 * learned,
            "entropy": 2.75 - 0.6 * learned, "response_tokens_mean": tokens,
            "response_tokens_p95": min(CAP_TOKENS, 1.6 * tokens), "share_at_cap": max(0.0, tokens - 52) / 60,
            "rollout_tokens": round(32 * tokens), "skipped_updates": 0, "plan": self._plan.to_record(),
            "seconds": seconds, "peak_memory_bytes": {str(d): round((60 + tokens) * MIB) for d in devices},
            "devices_present": devices,
            "predicted_s": {"current": sum(self.seconds_of(self._plan, step)),
                            "initial": sum(self.seconds_of(FIRST, step)) if fits else None},
        }  # fmt: skip
        if step == 26 * self.stretch:
            line["warnings"] = [describe_cap(0.61, CAP_TOKENS)]
        self.metrics.append(line)

    def write(self, folder: Path) -> Path:
        """Write the run directory, without state and journal."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(dump_config(load_config("tiny-cpu")))
        for name in ("metrics", "decisions", "transitions"):
            text = "".join(json.dumps(line) + "\n" for line in getattr(self, name))
            (folder / f"{name}.jsonl").write_text(text)
        return folder


if __name__ == "__main__":
    SampleRun(stretch=int(sys.argv[2]) if len(sys.argv) > 2 else 1).write(Path(sys.argv[1]))
