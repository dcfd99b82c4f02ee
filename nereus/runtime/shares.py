"""How a step's rollouts are shared out: over replicas, then into packed micro-batches, then to the devices.

Shares depend on the order and lengths of the samples only, so the same plan always computes the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from nereus.plan import StagePlan
from nereus.ppo.batching import pack_micro_batches, share_out
from nereus.runtime.generation import Request, Sampling
from nereus.runtime.inference import InferenceWork
from nereus.runtime.rank import GenerationWork
from nereus.runtime.rollouts import Rollouts
from nereus.runtime.samples import Minibatch, Sample
from nereus.runtime.training import TrainingWork

Work = TypeVar("Work")


def to_devices(plan: StagePlan, work: Sequence[Work]) -> dict[int, Work]:
    """Give every device of a replica the replica's work."""
    return {device: part for devices, part in zip(plan.replicas, work, strict=True) for device in devices}


def share_generation(
    plan: StagePlan, requests: Sequence[Request], sampling: Sampling, policy_version: int
) -> list[GenerationWork]:
    """Deal the requests over the replicas; response lengths aren't known yet, so all count alike.

    A replica has `plan.micro_batch` KV slots, at most one for each of its requests.
    """
    work = []
    for share in share_out([1] * len(requests), plan.dp):
        mine = tuple(requests[i] for i in share)
        longest = max(len(request.prompt) for request in mine) + sampling.max_response_tokens
        work.append(GenerationWork(mine, sampling, policy_version, min(plan.micro_batch, len(mine)), longest))
    return work


def share_inference(plan: StagePlan, samples: Sequence[Sample]) -> tuple[list[InferenceWork], list[list[int]]]:
    """Return per replica its work, and the indices of the samples in it."""
    lengths = [len(sample.tokens) for sample in samples]
    shares = share_out(lengths, plan.dp)
    work = []
    for share in shares:
        batches = pack_micro_batches([lengths[i] for i in share], plan.micro_batch, plan.layout.pp)
        work.append(InferenceWork(tuple(samples[i] for i in share), tuple(tuple(batch) for batch in batches)))
    return work, shares


def merge_inference(
    plan: StagePlan, shares: Sequence[Sequence[int]], results: Mapping[int, Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Bring the replicas' per-sample arrays, held by the first tp rank of each last stage, into sample order."""
    merged: list[np.ndarray] = [np.empty(0)] * sum(len(share) for share in shares)
    for devices, share in zip(plan.replicas, shares, strict=True):
        for index, array in zip(share, results[devices[-plan.layout.tp]], strict=True):
            merged[index] = array
    return merged


def share_training(
    plan: StagePlan, rollouts: Rollouts, columns: Sequence[str], minibatches: Sequence[Sequence[int]]
) -> list[TrainingWork]:
    """Return per replica all updates of the step. Every replica works on every minibatch.

    Args:
        minibatches: rollout indices of each update, in order.
    """
    lengths, responses = rollouts.total_lengths, rollouts.response_lengths
    local: list[dict[int, int]] = [{} for _ in range(plan.dp)]  # per replica: rollout index -> position in its samples
    updates: list[list[Minibatch]] = [[] for _ in range(plan.dp)]
    for minibatch in minibatches:
        ordered = sorted(minibatch)
        tokens = sum(responses[i] for i in ordered)
        for replica, share in enumerate(share_out([lengths[i] for i in ordered], plan.dp)):
            mine = [ordered[i] for i in share]
            for index in mine:
                local[replica].setdefault(index, len(local[replica]))
            batches = pack_micro_batches([lengths[i] for i in mine], plan.micro_batch, plan.layout.pp)
            positions = tuple(tuple(local[replica][mine[i]] for i in batch) for batch in batches)
            updates[replica].append(Minibatch(positions, tokens))
    return [
        TrainingWork(tuple(rollouts.sample(i, columns) for i in held), tuple(mine), plan.recompute)
        for held, mine in zip(local, updates, strict=True)
    ]
