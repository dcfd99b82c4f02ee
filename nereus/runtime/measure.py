"""What is measured of a step: its line of metrics.jsonl, and what the controller learns from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nereus.controller.decision import StepOutcome
from nereus.plan import Plan
from nereus.ppo.metrics import (
    compute_explained_variance,
    compute_kl_metrics,
    compute_response_metrics,
    compute_reward_metrics,
    digest_rollouts,
    digest_sample_ids,
    masked_max_gap,
)
from nereus.runtime.command_times import StepTimes
from nereus.runtime.rollouts import Rollouts
from nereus.runtime.timing import StepClock
from nereus.runtime.training import TrainingStats

# The stages of a step whose seconds are measured; a plan change and staged state add to theirs when there are any.
STAGE_SECONDS = ("generation", "inference", "training", "weight_sync", "transition", "staging")


def collect_metrics(
    *,
    step: int,
    policy_version: int,
    kl_coef: float,
    rollouts: Rollouts,
    stats: Mapping[str, Sequence[TrainingStats]],
    max_response_tokens: int,
    plan: Plan,
    clock: StepClock,
    peaks: Mapping[int, int],
) -> dict[str, Any]:
    """Return the step's metrics; KL, entropy, ratios and losses are means over response tokens."""
    assert rollouts.scores is not None
    mask = rollouts.mask()
    old, generated = rollouts.padded("old_logprobs"), rollouts.padded("generation_logprobs")
    return {
        "step": step,
        "policy_version": policy_version,
        **compute_reward_metrics(rollouts.scores),
        "kl_coef": kl_coef,
        **compute_kl_metrics(old, rollouts.padded("ref_logprobs"), mask),
        **_training_metrics(stats["actor.training"], stats["critic.training"]),
        "generation_logprob_gap_max": masked_max_gap(generated, old, mask),
        "explained_variance": compute_explained_variance(
            rollouts.padded("old_values"), rollouts.padded("returns"), mask
        ),
        **compute_response_metrics(rollouts.response_lengths, max_response_tokens),
        "plan": plan.to_record(),
        "peak_memory_bytes": {str(device): peak for device, peak in sorted(peaks.items())},
        "sample_ids_digest": digest_sample_ids(rollouts.sample_ids),
        "rollouts_digest": digest_rollouts(rollouts.sample_ids, [r.tokens for r in rollouts.responses]),
        "seconds": clock.seconds(STAGE_SECONDS),
    }


def measure_step(
    *,
    step: int,
    seconds: float,
    times: StepTimes,
    rollouts: Rollouts,
    plan: Plan,
    max_response_tokens: int,
    peaks: Mapping[int, int],
) -> StepOutcome:
    """Return what a step under a plan says about the model of costs.

    A pipeline's messages aren't told apart: what a rank waits for them is mostly for work of the stage before.
    """
    lengths = rollouts.response_lengths
    responses = compute_response_metrics(lengths, max_response_tokens)
    return StepOutcome(
        step=step,
        seconds=seconds,
        response_tokens=responses["response_tokens_mean"],
        response_tokens_p95=responses["response_tokens_p95"],
        response_tokens_longest=max(lengths),
        share_at_cap=responses["share_at_cap"],
        stages_s=times.tasks_s(),
        classes_s={
            task: {name: spent for name, spent in classes.items() if name != "p2p"}
            for task, classes in times.classes_s().items()
        },
        equal_work_s=_equal_work(times, plan),
        peak_bytes=dict(peaks),
    )


# Of fewer replicas none can be called slower than the others.
_LEAST_REPLICAS = 3


def _equal_work(times: StepTimes, plan: Plan) -> list[dict[int, float]]:
    """Return what a token has taken on the devices with the same rank in all replicas of a model-stage, by task.

    Waits for peers don't count. In generation no work is equal: it depends on the lengths that are drawn.
    """
    result = []
    for task in times.tasks():
        spent, tokens = times.of_task(task), times.tokens_of(task)
        name = task.split("/")[0]
        if name not in plan or plan[name].dp < _LEAST_REPLICAS or not tokens:
            continue
        for devices in zip(*plan[name].replicas, strict=True):
            result.append({device: spent[device].own_s / tokens[device] for device in devices if tokens[device]})
    return result


def _training_metrics(actor: Sequence[TrainingStats], critic: Sequence[TrainingStats]) -> dict[str, Any]:
    def mean(stats: Sequence[TrainingStats], name: str) -> float:
        """Sum the replicas' sums in their order, over the tokens of all applied updates; NaN if all were skipped."""
        tokens = sum(s.sums.get("tokens", 0.0) for s in stats)
        return sum(s.sums[name] for s in stats) / tokens if tokens else math.nan

    return {
        "policy_loss": mean(actor, "loss"),
        "value_loss": mean(critic, "loss"),
        "clip_fraction": mean(actor, "clipped"),
        "ratio_mean": mean(actor, "ratio"),
        "entropy": mean(actor, "entropy"),
        "first_ratio_max_error": max(s.first_ratio_max_error for s in actor),
        "gradient_norm": {"actor": actor[0].gradient_norms, "critic": critic[0].gradient_norms},
        "skipped_updates": actor[0].skipped + critic[0].skipped,
    }
