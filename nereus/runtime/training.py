"""A rank of a training model-stage: weights, optimizer, and the updates of one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from nereus.model.decoder import DecoderShard
from nereus.model.heads import token_logprobs
from nereus.ppo.losses import policy_loss, value_loss
from nereus.runtime.gradients import GradientBuffer, compute_gradient_norm, reduce_gradients
from nereus.runtime.links import Links
from nereus.runtime.pipeline import OneForwardOneBackward
from nereus.runtime.samples import Minibatch, PackedSamples, Sample, pack_samples

# A run whose updates are skipped this many times in a row has diverged.
MOST_SKIPPED_IN_A_ROW = 3


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW and clipping; `weight_decay` acts on matrices only, never on norms and biases."""

    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float


@dataclass(frozen=True)
class LossSettings:
    """What one role's loss needs beside its columns."""

    clip: float
    value_clip: float | None
    temperature: float


@dataclass(frozen=True)
class TrainingWork:
    """All updates of one step for one replica, in order; `minibatches` index into `samples`."""

    samples: tuple[Sample, ...]
    minibatches: tuple[Minibatch, ...]
    recompute: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of all updates together."""
        lengths = [len(sample.tokens) for sample in self.samples]
        return sum(lengths[i] for update in self.minibatches for batch in update.micro_batches for i in batch)


@dataclass
class TrainingStats:
    """What a replica's updates of one step leave, identical on the stage's tp ranks.

    `sums` are over its response tokens and the updates that were applied; `losses` (means over the minibatch's response
    tokens) and `gradient_norms` (before clipping) have an entry for every update, skipped ones too. `updates` and
    `skipped_in_a_row` count since the run's start.
    """

    sums: dict[str, float]
    first_ratio_max_error: float
    gradient_norms: list[float]
    losses: list[float]
    skipped: int
    updates: int = 0
    skipped_in_a_row: int = 0


class AdamW:
    """Adam with decoupled weight decay over the master weights of one rank (Loshchilov and Hutter, arXiv:1711.05101).

    Moments have the masters' dtype. One integer counts the updates of the whole model-stage.
    """

    def __init__(
        self,
        masters: dict[str, Tensor],
        exp_avg: dict[str, Tensor],
        exp_avg_sq: dict[str, Tensor],
        settings: OptimizerSettings,
    ) -> None:
        self.masters, self.exp_avg, self.exp_avg_sq = masters, exp_avg, exp_avg_sq
        self.settings = settings
        self.updates = 0

    def step(self, gradients: dict[str, Tensor], lr: float) -> None:
        """Apply one update in place."""
        matrices = [name for name, tensor in self.masters.items() if tensor.dim() > 1]
        vectors = [name for name, tensor in self.masters.items() if tensor.dim() <= 1]
        for names, decay in ((matrices, self.settings.weight_decay), (vectors, 0.0)):
            if not names:
                continue
            adamw(
                [self.masters[n] for n in names],
                [gradients[n] for n in names],
                [self.exp_avg[n] for n in names],
                [self.exp_avg_sq[n] for n in names],
                [],
                [torch.tensor(float(self.updates), device=self.masters[n].device) for n in names],
                fused=True,
                amsgrad=False,
                beta1=self.settings.betas[0],
                beta2=self.settings.betas[1],
                lr=lr,
                weight_decay=decay,
                eps=self.settings.eps,
                maximize=False,
            )
        self.updates += 1


class TrainingUnit:
    """One rank of actor.training or critic.training."""

    def __init__(
        self,
        shard: DecoderShard,
        links: Links,
        optimizer: OptimizerSettings,
        loss: LossSettings,
        *,
        masters: Mapping[str, Tensor],
        exp_avg: Mapping[str, Tensor],
        exp_avg_sq: Mapping[str, Tensor],
    ) -> None:
        """Train on tensors that are there, by parameter; unless they are bfloat16, the shard's are the masters."""
        self.shard = shard
        self.links = links
        self.loss = loss
        self.masters = dict(masters)
        self.optimizer = AdamW(self.masters, dict(exp_avg), dict(exp_avg_sq), optimizer)
        self.skipped_in_a_row = 0

    @property
    def updates(self) -> int:
        return self.optimizer.updates

    @property
    def device(self) -> torch.device:
        return next(iter(self.masters.values())).device

    def refresh_compute_weights(self) -> None:
        """Cast the masters into the compute copy (bfloat16 only; otherwise the weights are their own masters)."""
        with torch.no_grad():
            for name, parameter in self.shard.named_parameters():
                if parameter.data_ptr() != self.masters[name].data_ptr():
                    parameter.copy_(self.masters[name])

    def train(self, work: TrainingWork, learning_rate: Callable[[int], float]) -> TrainingStats:
        """Run all updates of the step and return this replica's statistics."""
        stats = TrainingStats({}, 0.0, [], [], 0)
        buffer = GradientBuffer(self.shard)
        try:
            for index, minibatch in enumerate(work.minibatches):
                self._update(buffer, work, minibatch, learning_rate(self.updates), stats, is_first=index == 0)
        finally:
            buffer.release()
        stats.updates, stats.skipped_in_a_row = self.updates, self.skipped_in_a_row
        return stats

    def _update(
        self,
        buffer: GradientBuffer,
        work: TrainingWork,
        minibatch: Minibatch,
        lr: float,
        stats: TrainingStats,
        *,
        is_first: bool,
    ) -> None:
        buffer.zero()
        objective = Objective(self.shard, self.loss)
        packed = [self._pack([work.samples[i] for i in micro_batch]) for micro_batch in minibatch.micro_batches]
        OneForwardOneBackward(self.shard, self.links, recompute=work.recompute).run(packed, objective)
        reduce_gradients(buffer, self.links)
        norm = compute_gradient_norm(buffer, self.links) / minibatch.response_tokens
        loss = self._sum_over_ranks(objective.loss_sum) / minibatch.response_tokens
        stats.losses.append(loss)
        stats.gradient_norms.append(norm)
        if is_first:
            stats.first_ratio_max_error = objective.ratio_max_error
        if math.isfinite(norm) and math.isfinite(loss):
            for name, value in objective.sums.items():
                stats.sums[name] = stats.sums.get(name, 0.0) + value
            clip = min(1.0, self.optimizer.settings.grad_clip / (norm + 1e-6))
            buffer.flat.mul_(clip / minibatch.response_tokens)
            self.optimizer.step(buffer.views, lr)
            self.refresh_compute_weights()
            self.skipped_in_a_row = 0
            return
        stats.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MOST_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"loss {loss} or gradient norm {norm} was not finite in {MOST_SKIPPED_IN_A_ROW} updates in a row; "
                "lower the learning rate or check the rewards."
            )

    def _pack(self, samples: Sequence[Sample]) -> PackedSamples:
        dtype = torch.promote_types(self.shard.dtype, torch.float32)
        return pack_samples(samples, dtype=dtype, device=self.device)

    def _sum_over_ranks(self, value: float) -> float:
        """Sum a last-stage number over replicas and hand it to all stages, so that all decide alike."""
        mine = value if self.links.is_last and self.links.tp_rank == 0 else 0.0
        total = torch.tensor([mine], dtype=torch.float64, device=self.device)
        self.links.replica.all_reduce(total)
        self.links.dp.all_reduce(total)
        return float(total.item())


class Objective:
    """The loss of one minibatch on the last stage, and the sums that metrics are made of."""

    def __init__(self, shard: DecoderShard, settings: LossSettings) -> None:
        self.shard = shard
        self.settings = settings
        self.sums: dict[str, float] = {}
        self.loss_sum = 0.0
        self.ratio_max_error = 0.0

    def __call__(self, hidden: Tensor, packed: PackedSamples) -> Tensor:
        rows = hidden.index_select(0, packed.rows)
        return self._value(rows, packed) if self.shard.spec.head == "value" else self._policy(rows, packed)

    def _policy(self, rows: Tensor, packed: PackedSamples) -> Tensor:
        columns = packed.columns
        logprobs, entropy = token_logprobs(self.shard, rows, packed.targets, temperature=self.settings.temperature)
        result = policy_loss(logprobs, columns["old_logprobs"], columns["advantages"], clip=self.settings.clip)
        error = (result.ratio.detach() - 1).abs().max().item()
        self.ratio_max_error = max(self.ratio_max_error, error) if math.isfinite(error) else math.inf
        self._add("ratio", result.ratio.detach().sum().item())
        self._add("clipped", float(result.clipped.sum().item()))
        self._add("entropy", entropy.sum().item())
        return self._finish(result.loss_sum, packed)

    def _value(self, rows: Tensor, packed: PackedSamples) -> Tensor:
        values = self.shard.values(rows)
        values = values.to(torch.promote_types(values.dtype, torch.float32))
        columns = packed.columns
        result = value_loss(values, columns["old_values"], columns["returns"], value_clip=self.settings.value_clip)
        return self._finish(result.loss_sum, packed)

    def _finish(self, loss_sum: Tensor, packed: PackedSamples) -> Tensor:
        self.loss_sum += loss_sum.item()
        self._add("loss", loss_sum.item())
        self._add("tokens", float(len(packed.targets)))
        return loss_sum

    def _add(self, name: str, value: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value
