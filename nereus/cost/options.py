"""Plan options of one model-stage as arrays, and where their messages travel: inside nodes or between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nereus.cluster import Cluster, NodeKind
from nereus.cost.operations import Array
from nereus.plan import StagePlan

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """dp, tp, pp, micro-batch and recomputation of many options, float64 arrays of one shape [n].

    `tp_across` and `pp_across` say whether some replica's tensor-parallel ranks, or neighbouring pipeline stages, lie
    on different nodes; `nodes` is the number of nodes.
    """

    dp: Array
    tp: Array
    pp: Array
    micro_batch: Array
    recompute: Flags
    tp_across: Flags
    pp_across: Flags
    nodes: Array

    @classmethod
    def of(
        cls,
        kind: NodeKind,
        dp: ArrayLike,
        tp: ArrayLike,
        pp: ArrayLike,
        micro_batch: ArrayLike = 1,
        recompute: ArrayLike = False,
    ) -> Options:
        """Return options whose devices are neighbours from a node's first device on; the arguments broadcast."""
        numbers = [np.atleast_1d(np.asarray(array, dtype=np.float64)) for array in (dp, tp, pp, micro_batch)]
        dp_, tp_, pp_, micro_batch_, recompute_ = np.broadcast_arrays(*numbers, np.atleast_1d(np.asarray(recompute)))
        size = tp_ * pp_
        many = dp_ * size > kind.devices
        return cls(
            dp_,
            tp_,
            pp_,
            micro_batch_,
            recompute_.astype(bool),
            tp_across=many & ((tp_ > kind.devices) | (kind.devices % tp_ != 0)),
            pp_across=many & (pp_ > 1) & ((size > kind.devices) | (kind.devices % size != 0)),
            nodes=np.ceil(dp_ * size / kind.devices),
        )

    @classmethod
    def of_stage(cls, stage: StagePlan, cluster: Cluster) -> Options:
        """Return the one option of a planned model-stage, with its true devices."""
        tp, pp = stage.layout.tp, stage.layout.pp
        nodes = np.fromiter((cluster.node_of(device) for device in stage.devices), np.int64, len(stage.devices))
        ranks = nodes.reshape(stage.dp, pp, tp)
        tp_across = bool((ranks != ranks[:, :, :1]).any())
        pp_across = bool((ranks[:, 1:] != ranks[:, :-1]).any())
        return cls(
            dp=np.array([float(stage.dp)]),
            tp=np.array([float(tp)]),
            pp=np.array([float(pp)]),
            micro_batch=np.array([float(stage.micro_batch)]),
            recompute=np.array([stage.recompute]),
            tp_across=np.array([tp_across]),
            pp_across=np.array([pp_across]),
            nodes=np.array([float(len(np.unique(nodes)))]),
        )

    @cached_property
    def size(self) -> Array:
        """Devices of one replica."""
        return self.tp * self.pp

    @cached_property
    def devices(self) -> Array:
        return self.dp * self.size

    def __len__(self) -> int:
        return len(self.dp)
