"""Peak memory of many options of one model-stage at once: what its worst rank holds always, and at its peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.cost.rank_memory import Precision, Workload, estimate_rank
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class OptionMemory:
    """Bytes of the worst rank for each option: `resident` always; `peak` with its hungriest phase.

    The peak of a device is at most the largest of (peak of one model-stage + residents of the others on it).
    """

    resident: Bytes
    peak: Bytes


def estimate_option_memory(
    model_stage: str,
    spec: ModelSpec,
    workload: Workload,
    precision: Precision,
    dp: ArrayLike,
    tp: ArrayLike,
    pp: ArrayLike,
    micro_batch: ArrayLike,
    recompute: ArrayLike = False,
) -> OptionMemory:
    """Return the memory of options; the arguments broadcast to one shape [n]. Never below what `memory` says."""
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(a)) for a in (dp, tp, pp, micro_batch, recompute)))
    resident, peak = np.zeros(arrays[0].shape, np.int64), np.zeros(arrays[0].shape, np.int64)
    for index, (dp_, tp_, pp_, micro_batch_, recompute_) in enumerate(zip(*arrays, strict=True)):
        layout = Layout(int(tp_), int(pp_))
        stage = StagePlan(int(dp_), layout, (), int(micro_batch_), bool(recompute_))
        for rank in range(0, layout.size, layout.tp):
            need = estimate_rank(model_stage, stage, spec, rank, workload, precision)
            held = sum(need.resident.values())
            resident[index] = max(resident[index], held)
            peak[index] = max(peak[index], held + max(sum(kinds.values()) for kinds in need.phases.values()))
    return OptionMemory(resident, peak)
