"""Drawing tokens from logits whose vocabulary is split over the tensor-parallel ranks.

A token is the first id whose cumulative probability exceeds the sample's uniform number, in float64 and in the
order of ids, so a draw doesn't depend on how the vocabulary is split. Exponentials are summed in blocks; the
cumulative sum runs over the blocks and then inside one block only, which is what makes 49,152 ids affordable.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nereus.model.group import Group

BLOCK = 256  # ids summed as one
CPU_ROWS = 4  # samples whose exponentials are made at once: the buffer is reused and stays in the cache


def sample_tokens(
    logits: Tensor, u: Tensor | np.ndarray, *, temperature: float, top_p: float, group: Group, vocab_start: int
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature); every rank returns the same result.

    Log-probs are of the full softmax at the temperature, whatever `top_p`. Temperature 0 takes the first id of the
    largest logit, and its log-probs are those at temperature 1 (`u` and `top_p` then play no part).

    Args:
        logits: [B, V_local], this rank's slice of the vocabulary; slices ascend with the rank and none is empty.
        u: [B] float64 in [0, 1), the same on every rank.
        temperature: at least 0.
        top_p: in (0, 1]; below 1 draws come from the smallest set of ids, by falling probability and rising id,
            whose probability is at least `top_p`.
        group: the ranks that share the vocabulary.
        vocab_start: id of this slice's first entry.

    Returns:
        Tokens, int64 [B], and their log-probs in nats, float64 [B].

    Raises:
        FloatingPointError: a row has NaN or infinite logits, or none that is finite.
    """
    if temperature == 0.0:
        return _take_largest(logits, group, vocab_start)
    u = torch.as_tensor(u, dtype=torch.float64, device=logits.device)
    if top_p < 1.0:
        return _draw_from_nuclei(_gather_vocabulary(logits, group), u, temperature, top_p)
    return _draw(logits, u, temperature, group, vocab_start)


def _draw(logits: Tensor, u: Tensor, temperature: float, group: Group, vocab_start: int) -> tuple[Tensor, Tensor]:
    peak = logits.amax(dim=-1).double()
    base = peak.masked_fill(peak == -torch.inf, 0.0)  # a slice may be masked out as a whole
    cdf = _sum_blocks(logits, base, temperature).cumsum(dim=-1)
    peaks, sums = _gather_stats(group, peak, cdf[:, -1])
    top = peaks.amax(dim=0)
    scales = torch.exp((peaks - top) / temperature)
    cumulative = (sums * scales).cumsum(dim=0)  # [ranks, B]: its last row is the total, shifted by one the prefix
    total = _checked(cumulative[-1])
    target = u * total
    # u < 1 - 2^-54 makes target < total in float64 too, so some rank owns every draw.
    mine = (cumulative <= target).sum(dim=0) == group.rank
    prefix = cumulative[group.rank - 1] if group.rank else torch.zeros_like(total)
    local = _find_local(logits, base, temperature, cdf, (target - prefix) / scales[group.rank])
    chosen = logits.gather(1, local[:, None])[:, 0].double()
    result = torch.stack([(local + vocab_start).double(), (chosen - top) / temperature - total.log()])
    result = torch.where(mine, result, 0.0)
    group.all_reduce(result, "sum")
    return result[0].long(), result[1]


def _take_largest(logits: Tensor, group: Group, vocab_start: int) -> tuple[Tensor, Tensor]:
    local = logits.argmax(dim=-1)  # the first one among equals
    peak = logits.gather(1, local[:, None])[:, 0].double()
    base = peak.masked_fill(peak == -torch.inf, 0.0)
    sums = _sum_blocks(logits, base, 1.0).sum(dim=-1)
    peaks, sums, ids = _gather_stats(group, peak, sums, (local + vocab_start).double())
    top = peaks.amax(dim=0)
    total = _checked((sums * torch.exp(peaks - top)).sum(dim=0))
    owner = peaks.argmax(dim=0, keepdim=True)
    return ids.gather(0, owner)[0].long(), -total.log()


def _gather_stats(group: Group, *stats: Tensor) -> Tensor:
    """Return every rank's [B] statistics as [number of statistics, ranks, B]."""
    return torch.cat(group.all_gather(torch.stack(stats)[None])).transpose(0, 1)


def _checked(total: Tensor) -> Tensor:
    if not bool(torch.isfinite(total).all()):
        rows = (~torch.isfinite(total)).nonzero()[:, 0].tolist()
        raise FloatingPointError(
            f"The logits of rows {rows} have no finite softmax; lower ppo.actor_lr or check the weights."
        )
    return total


def _sum_blocks(logits: Tensor, base: Tensor, temperature: float) -> Tensor:
    """Return sums of exp((logits - base) / temperature) over blocks of ids, float64 [B, blocks]."""
    num_rows, num_ids = logits.shape
    num_whole, rest = divmod(num_ids, BLOCK)
    sums = base.new_empty(num_rows, num_whole + (rest > 0))
    rows_at_once = CPU_ROWS if logits.device.type == "cpu" else num_rows
    buffer = base.new_empty(min(rows_at_once, num_rows), num_ids)
    for start in range(0, num_rows, max(rows_at_once, 1)):
        rows = slice(start, min(start + rows_at_once, num_rows))
        weights = buffer[: rows.stop - rows.start]
        torch.sub(logits[rows], base[rows, None], out=weights)
        if temperature != 1.0:
            weights.div_(temperature)
        weights.exp_()
        sums[rows, :num_whole] = weights[:, : num_whole * BLOCK].unflatten(1, (num_whole, BLOCK)).sum(dim=-1)
        if rest:
            sums[rows, -1] = weights[:, num_whole * BLOCK :].sum(dim=-1)
    return sums


def _find_local(logits: Tensor, base: Tensor, temperature: float, cdf: Tensor, target: Tensor) -> Tensor:
    """Return the first local index [B] whose cumulative weight exceeds `target`, given the blocks' `cdf`."""
    block = _first_above(cdf, target)
    before = torch.nn.functional.pad(cdf, (1, 0)).gather(1, block[:, None])[:, 0]
    ids = block[:, None] * BLOCK + torch.arange(BLOCK, device=logits.device)
    ids = ids.clamp(max=logits.shape[1] - 1)  # past the end the last id repeats, which changes no draw
    weights = torch.exp((logits.gather(1, ids).double() - base[:, None]) / temperature)
    inside = _first_above(weights.cumsum(dim=-1), target - before)
    return ids.gather(1, inside[:, None])[:, 0]


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """Return the first index [B] at which `cdf` [B, n] exceeds `target` [B].

    Where rounding leaves none, the last index that added weight is returned: never one of probability 0.
    """
    found = torch.searchsorted(cdf, target[:, None].contiguous(), right=True)
    last = torch.searchsorted(cdf, cdf[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0]


def _gather_vocabulary(logits: Tensor, group: Group) -> Tensor:
    if group.size == 1:
        return logits
    # Ranks may hold unequal slices, and only dimension 0 may differ in a gather.
    return torch.cat(group.all_gather(logits.t().contiguous())).t().contiguous()


def _draw_from_nuclei(logits: Tensor, u: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw from whole rows of logits; every rank does the same work on the same numbers."""
    peaks = logits.amax(dim=-1).double()
    totals = _checked(_sum_blocks(logits, peaks, temperature).sum(dim=-1))
    tokens = torch.empty(len(u), dtype=torch.int64, device=u.device)
    for row in range(len(u)):
        weights = torch.exp((logits[row].double() - peaks[row]) / temperature)
        ids = _find_nucleus(weights, totals[row], top_p)
        cdf = weights[ids].cumsum(dim=0)[None]
        tokens[row] = ids[_first_above(cdf, u[row] * cdf[:, -1])[0]]
    chosen = logits.gather(1, tokens[:, None])[:, 0].double()
    return tokens, (chosen - peaks) / temperature - totals.log()


def _find_nucleus(weights: Tensor, total: Tensor, top_p: float) -> Tensor:
    """Return, ascending, the ids of the smallest set by (-weight, id) with at least `top_p` of the `total` weight."""
    # All ids below this weight together have less than 1 - top_p, so the set is among the others: few to sort.
    candidates = (weights >= 0.5 * (1.0 - top_p) * total / len(weights)).nonzero()[:, 0]
    falling, order = weights[candidates].sort(descending=True, stable=True)
    size = int(torch.searchsorted(falling.cumsum(dim=0), top_p * total)) + 1
    return candidates[order[:size]].sort().values
