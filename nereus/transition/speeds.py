"""How fast bytes move in a transition: nominal numbers of a cluster, or what a probe of the machine has measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nereus.cluster import Cluster, Link
from nereus.cost.efficiency import Efficiencies


@dataclass(frozen=True)
class Speeds:
    """What the machine reaches, each way: links and storage in bytes/s and seconds a message.

    Attributes:
        node_of: by device id.
        near: of a device to new memory of another one on its node, packing and laying down included.
        far: of a node to all others; `write`, `read`: of a node to storage.
        near_both: as `near`, each way, while a device sends and receives at once; None: just as fast.
        copy_bytes_s: inside a device.
        setup_s: of a communicator, for each message that its set-up is long.
        verify_bytes_s: of a device that sums up its state, which takes `verify_piece_s` more for each piece.
        command_s: until all devices have begun what they are told, and said that it is done.
        commit_s: the commit record, and what else a transition takes once.
        read_device_bytes_s: what the cores of one device manage when it reads from storage alone.
        storage_shared: by what part of the shorter of the two a node takes longer than the longer one when it writes to
            storage and reads from it at the same time: 0 where they don't disturb each other, 1 where they could as
            well take turns, such as on cores that both need.
    """

    node_of: Callable[[int], int]
    near: Link
    far: Link
    write: Link
    read: Link
    copy_bytes_s: float
    setup_s: float = 0.0
    verify_bytes_s: float = float("inf")
    commit_s: float = 0.0
    near_both: Link | None = None
    verify_piece_s: float = 0.0
    command_s: float = 0.0
    read_device_bytes_s: float = float("inf")
    storage_shared: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster, efficiencies: Efficiencies) -> Speeds:
        """Return nominal numbers times what share of them is reached."""
        kind, share, latency = cluster.kind, efficiencies.efficiency, efficiencies.latency_s

        def link(nominal: Link, name: str) -> Link:
            return Link(nominal.bandwidth_bytes_s * share[name], max(nominal.latency_s, latency[name]))

        return cls(
            cluster.node_of,
            near=link(kind.intra_node, "p2p"),
            far=link(kind.inter_node, "p2p"),
            write=link(kind.storage, "storage_write"),
            read=link(kind.storage, "storage_read"),
            copy_bytes_s=kind.memory_bandwidth_bytes_s * share["decode"] / 2,
            setup_s=latency["comm_setup"],
        )
