"""Training alarms: what the metrics of a step say is wrong with the training itself, which no plan can mend.

metrics line -> responses at the cap | KL | reward | log-prob gap | memory left behind -> one sentence each
No I/O and no clock. What is remembered of past steps is small and can be staged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Self, TypeGuard

from nereus.controller.monitor import describe_cap
from nereus.plan import places_of

# An alarm that goes on is told again after this many steps, not at every one.
REPEAT_STEPS = 10

# KL a response token in nats. Blown up: so many times its usual value, where it isn't negligible, or beyond any use: a
# policy whose tokens the reference finds e^2 times less likely.
KL_JUMP, KL_NEGLIGIBLE, KL_MOST = 4.0, 0.1, 2.0
# Steps before this one that its usual value is taken from, and how many of them it takes.
_USUAL_STEPS, _FEWEST_STEPS = 8, 4

# The reward is judged by means over so many steps; it has collapsed when half of what was gained is gone again.
REWARD_WINDOW, REWARD_LOSS = 4, 0.5

# Largest difference between the sampler's and the trainer's log-prob of a token. In bfloat16 both round differently by
# as much as the model makes of it, so there it is held against the largest one so far.
GAP_MOST, GAP_JUMP = {"float64": 1e-9, "float32": 1e-3}, 3.0

# Memory has stayed behind when so many steps all peak above every earlier step of at least their work, by this much.
MEMORY_STEPS, MEMORY_GROWTH, MEMORY_LEAST_BYTES = 4, 0.1, 16 << 20
_MEMORY_KEPT = 64
_SAME_TOKENS = 0.98  # work that differs by less is equal


class Alarms:
    """Looks at every line of metrics.jsonl in turn; knows of the past what the next look needs.

    A step may come again after the run was set back: what was remembered of it, and of those after it, is forgotten.
    """

    def __init__(self, *, cap_tokens: int, precision: str) -> None:
        """Args: cap_tokens: most tokens of a response; precision: the run's, which bounds the log-prob gap."""
        self._cap_tokens = cap_tokens
        self._precision = precision
        self._steps: list[dict[str, Any]] = []  # the last few, newest last
        self._rewards: list[dict[str, float]] = []  # the first window, and each that was the best so far
        self._memory: list[dict[str, Any]] = []  # steps on the plan in force, thinned out when they get many
        self._plan: dict[str, Any] = {}
        self._largest_gap = 0.0
        self._told: dict[str, int] = {}

    def look(self, line: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each alarm that a line of metrics gives: what, the numbers, and what to look at.

        An alarm that goes on is told again every 10 steps. Numbers a line doesn't have give no alarm.
        """
        self._forget_from(line["step"])
        found = {name: text for name, text in self._find(line) if text is not None}
        due = [name for name in found if line["step"] - self._told.get(name, -REPEAT_STEPS) >= REPEAT_STEPS]
        self._told |= dict.fromkeys(due, line["step"])
        self._remember(line, learn_gap="gap" not in found and not self._has_moved(line))
        return [found[name] for name in due]

    def _find(self, line: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
        yield "cap", describe_cap(line.get("share_at_cap") or 0.0, self._cap_tokens)
        yield "kl", describe_kl(line, self._steps)
        yield "reward", describe_reward(line, self._steps, self._rewards)
        if not self._has_moved(line):  # that the weights arrived whole is checked by the transition itself
            yield "gap", self._describe_gap(line)
        if line.get("plan") == self._plan:
            yield "memory", describe_memory(line, self._memory)

    def _has_moved(self, line: Mapping[str, Any]) -> bool:
        """Return whether the plan has changed right before this step, or devices hold what they didn't."""
        plan = line.get("plan", {})
        return bool(self._plan) and places_of(plan) != places_of(self._plan)

    def _describe_gap(self, line: Mapping[str, Any]) -> str | None:
        if "generation_logprob_gap_max" not in line:
            return None
        gap, learned = line["generation_logprob_gap_max"], GAP_JUMP * self._largest_gap
        most = GAP_MOST.get(self._precision) or (learned if len(self._steps) >= _FEWEST_STEPS else math.inf)
        if not _is_number(gap):
            what = "no number"
        elif gap > most:
            what = f"up to {gap:.1e}, beyond {most:.1e} in {self._precision}"
        else:
            return None
        return (
            f"The sampler's and the trainer's log-probs of the same tokens differ by {what}; look "
            "at the weights that generation uses (policy version, weight sync), at padding and at the temperature."
        )

    def _remember(self, line: Mapping[str, Any], *, learn_gap: bool) -> None:
        gap = line.get("generation_logprob_gap_max")
        if learn_gap and _is_number(gap):
            self._largest_gap = max(self._largest_gap, gap)
        step = {name: line.get(name) for name in ("step", "kl_k1", "reward_mean", "reward_std")}
        self._steps = [*self._steps, step][-_USUAL_STEPS:]
        window = _reward_window(self._steps)
        if window is not None and (not self._rewards or window["mean"] > self._rewards[-1]["mean"]):
            # Of the windows between the first one and the best nothing is needed.
            self._rewards = [*self._rewards[:1], window]
        plan = dict(line.get("plan", {}))
        if plan != self._plan:
            self._memory, self._plan = [], plan
        self._memory.append(
            {
                "step": line["step"],
                "tokens": line.get("rollout_tokens", 0),
                "p95": line.get("response_tokens_p95") or 0.0,
                "peaks": {str(device): peak for device, peak in line.get("peak_memory_bytes", {}).items()},
            }
        )
        if len(self._memory) > _MEMORY_KEPT:
            self._memory = [*self._memory[:-MEMORY_STEPS:2], *self._memory[-MEMORY_STEPS:]]

    def _forget_from(self, step: int) -> None:
        for kept in (self._steps, self._rewards, self._memory):
            kept[:] = [entry for entry in kept if entry["step"] < step]
        self._told = {name: told for name, told in self._told.items() if told < step}

    def to_record(self) -> dict[str, Any]:
        """Return what is remembered, as plain values for staged state."""
        return {
            "steps": list(self._steps),
            "rewards": list(self._rewards),
            "memory": list(self._memory),
            "plan": dict(self._plan),
            "largest_gap": self._largest_gap,
            "told": dict(self._told),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], *, cap_tokens: int, precision: str) -> Self:
        """Return the alarms as they were when `to_record` was called."""
        alarms = cls(cap_tokens=cap_tokens, precision=precision)
        alarms._steps, alarms._rewards = list(record["steps"]), list(record["rewards"])
        alarms._memory, alarms._plan = list(record["memory"]), dict(record["plan"])
        alarms._largest_gap, alarms._told = record["largest_gap"], dict(record["told"])
        return alarms


def describe_kl(line: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning when the KL to the reference has jumped, is beyond any use, or is no number.

    Args:
        before: the last few steps' {"kl_k1": nats a response token}.
    """
    if "kl_k1" not in line:
        return None
    kl, past = line["kl_k1"], [entry["kl_k1"] for entry in before if _is_number(entry["kl_k1"])]
    usual = median(past) if len(past) >= _FEWEST_STEPS else math.inf
    if not _is_number(kl):
        what = "is no number"
    elif kl > KL_MOST:
        what = f"is {kl:.2f} nats a token, more than {KL_MOST:g}"
    elif kl > max(KL_NEGLIGIBLE, KL_JUMP * usual):
        what = f"jumped to {kl:.3f} nats a token from {usual:.3f} over the {len(past)} steps before"
    else:
        return None
    return (
        f"The KL to the reference {what}; look at the actor's learning rate, the KL weight "
        "(ppo.kl_coef), and whether the reward is being gamed."
    )


def describe_reward(
    line: Mapping[str, Any], before: Sequence[Mapping[str, Any]], windows: Sequence[Mapping[str, float]]
) -> str | None:
    """Return a warning when half of the reward that was gained is gone, and it isn't noise.

    Noise is what the responses of one step differ by (one standard deviation); a mean over a window is far steadier.

    Args:
        before: the last few steps' {"reward_mean", "reward_std"}.
        windows: the first window and the best one so far, as {"step", "mean", "std"}.
    """
    now = _reward_window([*before, line])
    if now is None or not windows:
        return None
    first, best = windows[0], windows[-1]
    lost = best["mean"] - now["mean"]
    if lost <= max(REWARD_LOSS * (best["mean"] - first["mean"]), best["std"], now["std"]):
        return None
    return (
        f"The reward fell to {now['mean']:.3f} (mean over {REWARD_WINDOW} steps) from "
        f"{best['mean']:.3f} at step {best['step']:.0f}; look at the actor's learning rate, the KL, and what the "
        "responses say now."
    )


def describe_memory(line: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning when a device's peak has grown on an unchanged plan, though the work hasn't.

    Args:
        before: steps on this plan as {"tokens", "p95", "peaks": {device: bytes}}, oldest first.
    """
    peaks = {str(device): peak for device, peak in line.get("peak_memory_bytes", {}).items()}
    newest = {"tokens": line.get("rollout_tokens", 0), "p95": line.get("response_tokens_p95") or 0.0, "peaks": peaks}
    recent = [*before[len(before) - MEMORY_STEPS + 1 :], newest]
    tokens, p95 = (max(entry[key] for entry in recent) for key in ("tokens", "p95"))
    # The first step on a plan fills caches, and where memory is reused it peaks like no other.
    earlier = before[1 : len(before) - MEMORY_STEPS + 1]
    equal = [entry for entry in earlier if entry["tokens"] >= _SAME_TOKENS * tokens and entry["p95"] >= p95]
    for device in sorted(peaks):
        now, then = ([entry["peaks"][device] for entry in part if device in entry["peaks"]] for part in (recent, equal))
        if min(len(now), len(then)) < MEMORY_STEPS or min(now) <= max(then):
            continue
        grown = median(now) - median(then)
        if grown > max(MEMORY_GROWTH * median(then), MEMORY_LEAST_BYTES):
            return (
                f"Device {device} peaks at {median(now) / 2**20:,.0f} MiB, {grown / 2**20:,.0f} "
                f"MiB above steps {equal[0]['step']}-{equal[-1]['step']} of as much work on the same plan; memory is "
                "left behind: look at what the reward function or a tracker keeps, and at fragmentation."
            )
    return None


def _reward_window(steps: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return the mean reward of the last steps and its spread within a step; None where a number is missing."""
    last = steps[-REWARD_WINDOW:]
    values = [step.get(name) for step in last for name in ("reward_mean", "reward_std")]
    if len(last) < REWARD_WINDOW or not all(_is_number(value) for value in values):
        return None
    mean, std = (fmean(step[name] for step in last) for name in ("reward_mean", "reward_std"))
    return {"step": last[-1]["step"], "mean": mean, "std": std}


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)
