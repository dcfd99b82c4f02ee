"""Nominal speeds of a cluster's devices and links, and what collectives need of them at efficiency 1."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nereus.cluster import NodeKind
from nereus.cost.activations import COMPUTE_BYTES, lifted_bytes
from nereus.cost.operations import Array
from nereus.cost.options import Options
from nereus.cost.rank_memory import Precision


@dataclass(frozen=True)
class Rates:
    """Seconds a FLOP and a byte at the nominal peaks, and bytes an element, of one node kind in one precision."""

    kind: NodeKind
    precision: Precision

    @property
    def element_bytes(self) -> int:
        return COMPUTE_BYTES[self.precision]

    @property
    def master_bytes(self) -> int:
        """Bytes of an element of master weights, gradients and moments."""
        return lifted_bytes(self.precision)

    @property
    def flop_s(self) -> float:
        return 1.0 / self.kind.peak_flops[self.precision]

    @property
    def byte_s(self) -> float:
        """Seconds a byte between a device and its own memory."""
        return 1.0 / self.kind.memory_bandwidth_bytes_s

    @property
    def intra_byte_s(self) -> float:
        return 1.0 / self.kind.intra_node.bandwidth_bytes_s

    @property
    def inter_byte_s(self) -> float:
        """Seconds a byte through the network of one node, which its devices share."""
        return 1.0 / self.kind.inter_node.bandwidth_bytes_s

    def tensor_parallel_byte_s(self, options: Options) -> Array:
        """Return the seconds a byte of a tensor that the tp ranks of one stage all-reduce.

        A ring sends and receives 2 (n - 1) / n of the tensor at each rank. Where the ring leaves the node, the groups
        of the node's devices that do so at once share its network.
        Source: Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2), section 3.
        """
        ring = 2.0 * (options.tp - 1.0) / options.tp
        groups = np.maximum(1.0, np.ceil(self.kind.devices / options.tp))
        return ring * np.where(options.tp_across, groups * self.inter_byte_s, self.intra_byte_s)

    def pipeline_byte_s(self, options: Options) -> Array:
        """Return the seconds a byte that each tp rank sends to the next stage; between nodes they share the network."""
        together = np.minimum(options.tp, self.kind.devices)
        return np.where(options.pp_across, together * self.inter_byte_s, self.intra_byte_s)

    def data_parallel_byte_s(self, options: Options) -> Array:
        """Return the seconds a byte of a rank's gradients that dp replicas all-reduce.

        The ring visits node after node, so it crosses each node's border once a direction, beside the rings of the
        other ranks of the replica on that node, with which it shares the network; inside the nodes it runs at the
        devices' links. The slower of the two decides.
        """
        ring = 2.0 * (options.dp - 1.0) / options.dp
        rings = np.minimum(options.size, self.kind.devices)
        return ring * np.where(
            (options.nodes > 1) & (options.dp > 1),
            np.maximum(rings * self.inter_byte_s, self.intra_byte_s),
            self.intra_byte_s,
        )


def ring_steps(ranks: Array) -> Array:
    """Return how often a collective of some ranks pays the latency: as deep as a binary tree is, 0 for one rank.

    Source: NCCL switches from rings to double binary trees where latency matters (Sanders et al. 2009).
    """
    return np.ceil(np.log2(np.maximum(1.0, ranks)))
