"""Log-probabilities of chosen tokens under a vocabulary-parallel head, without a second full-size temporary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nereus.limits import LOGITS_BLOCK_BYTES as _BLOCK_BYTES
from nereus.limits import logits_chunk_rows
from nereus.model.group import Group
from nereus.model.linear import product, weight_gradient
from nereus.model.rotary import lifted

if TYPE_CHECKING:
    from nereus.model.decoder import DecoderShard


def _block_rows(vocab_local: int, dtype: torch.dtype) -> int:
    return max(1, _BLOCK_BYTES // (vocab_local * dtype.itemsize))


def _statistics(logits: Tensor, targets: Tensor, first: int, scale: float, out: Tensor) -> None:
    """Fill out [4, m] from this rank's logits [m, V_local].

    With z = logits * scale the rows are max z, sum exp(z - max), sum exp(z - max) * z, and z of the target where this
    rank holds it, else 0.
    """
    vocab_local = logits.shape[1]
    step = _block_rows(vocab_local, out.dtype)
    buffer = out.new_empty(min(step, logits.shape[0]), vocab_local)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        z = _scaled(logits[rows], scale, out.dtype)
        local = targets[rows] - first
        held = (local >= 0) & (local < vocab_local)
        chosen = z.gather(1, local.clamp(0, vocab_local - 1)[:, None])[:, 0]
        out[3, rows] = chosen.masked_fill(~held, 0.0)
        out[0, rows] = z.amax(1)
        weights = torch.sub(z, out[0, rows, None], out=buffer[: len(z)]).exp_()
        out[1, rows] = weights.sum(1)
        out[2, rows] = torch.linalg.vecdot(weights, z)


def _scaled(logits: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return logits * scale in `dtype`: a new tensor, or the logits themselves where nothing changes."""
    z = logits.to(dtype)
    return z if scale == 1.0 else z * scale


def _combine(local: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprob of the target, log of the partition sum, entropy), each [M], from the ranks' statistics."""
    highest = local[0].clone()
    sums = local[1:].clone()
    if group.size > 1:
        group.all_reduce(highest, "max")
        sums[:2] *= (local[0] - highest).exp()
        group.all_reduce(sums)
    log_partition = highest + sums[0].log()
    return sums[2] - log_partition, log_partition, log_partition - sums[1] / sums[0]


def _to_gradient_(
    logits: Tensor, targets: Tensor, first: int, scale: float, log_partition: Tensor, grad: Tensor
) -> None:
    """Overwrite logits [m, V_local] with d loss / d logits = grad * scale * (onehot - softmax)."""
    vocab_local = logits.shape[1]
    step = _block_rows(vocab_local, log_partition.dtype)
    for start in range(0, logits.shape[0], step):
        rows = slice(start, start + step)
        factor = grad[rows, None] * scale
        d = logits[rows].to(log_partition.dtype)  # the logits themselves unless they are lifted
        if scale != 1.0:
            d.mul_(scale)
        d.sub_(log_partition[rows, None]).exp_().mul_(-factor)
        local = targets[rows] - first
        held = (local >= 0) & (local < vocab_local)
        d.scatter_add_(1, local.clamp(0, vocab_local - 1)[:, None], factor * held[:, None])
        if d.dtype != logits.dtype:
            logits[rows] = d


class _TokenLogprobs(torch.autograd.Function):
    """Backward overwrites the kept logits, so it runs once (no retain_graph)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, first: int, scale: float, group: Group
    ) -> tuple[Tensor, Tensor]:
        num_rows = hidden.shape[0]
        local = hidden.new_empty((4, num_rows), dtype=lifted(hidden.dtype))
        step = logits_chunk_rows(num_rows, weight.shape[0], hidden.element_size())
        logits = None
        for start in range(0, num_rows, step):
            rows = slice(start, start + step)
            logits = None  # the last chunk goes before the next one comes
            logits = product(hidden[rows], weight)
            _statistics(logits, targets[rows], first, scale, local[:, rows])
        logprobs, log_partition, entropy = _combine(local, group)
        ctx.logits = logits if step >= num_rows else None
        ctx.save_for_backward(hidden, targets, log_partition)
        ctx.weight = weight  # the parameter itself, for its sink
        ctx.rest = (first, scale, group, step)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, targets, log_partition = ctx.saved_tensors
        weight = ctx.weight.detach()
        first, scale, group, step = ctx.rest
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None
        logits: Tensor | None
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, start + step)
            logits = None  # as in the forward pass
            logits = product(hidden[rows], weight) if ctx.logits is None else ctx.logits
            _to_gradient_(logits, targets[rows], first, scale, log_partition[rows], grad[rows])
            if grad_hidden is not None:
                grad_hidden[rows] = product(logits, weight.t())
            part = weight_gradient(logits, hidden[rows], ctx.weight) if need_weight else None
            if part is not None:
                grad_weight = part if grad_weight is None else grad_weight.add_(part)
        ctx.logits = None
        if grad_hidden is not None and group.size > 1:
            group.all_reduce(grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None


def token_logprobs(
    shard: DecoderShard, hidden: Tensor, targets: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the targets, entropy), each [M], of softmax(logits / temperature).

    Args:
        shard: a last-stage shard with an "lm" head; all tp ranks call with the same arguments.
        hidden: [M, hidden] after the final norm; select the positions that matter before the call.
        targets: [M] int64 token ids of the whole vocabulary.

    Both are at least float32. Log-probs are differentiable once in `hidden` and the head's weight, entropy is not.
    """
    if hidden.shape[0] == 0:
        empty = hidden.new_empty(0, dtype=lifted(hidden.dtype))
        return hidden.sum(-1).to(empty.dtype), empty
    weight, first = shard.head_weight, shard.vocab_range[0]
    return _TokenLogprobs.apply(hidden, weight, targets, first, 1.0 / temperature, shard.group)  # type: ignore
