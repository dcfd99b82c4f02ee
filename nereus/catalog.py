"""Real clusters by name: their nodes, devices and links, with nominal numbers from public sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nereus.cluster import Cluster, Link, NodeKind, uniform_cluster

# Assumed, not published for these machines: a message's latency at the hardware (what software adds to it is learned),
# and the bandwidth of one node to shared storage.
_INTRA_LATENCY_S = 2e-6
_INTER_LATENCY_S = 5e-6
_STORAGE_LATENCY_S = 2e-3
_STORAGE_BYTES_S = 2.5e9

# Plans for more devices than these aren't sought in any time that people wait.
MOST_DEVICES = 65536


@dataclass(frozen=True)
class _Entry:
    kind: NodeKind
    num_nodes: int


def _flops(bfloat16: float, float32: float, float64: float) -> Mapping[str, float]:
    return MappingProxyType({"bfloat16": bfloat16, "float32": float32, "float64": float64})


def _kind(
    name: str,
    *,
    devices: int,
    memory_bytes: float,
    peak_flops: Mapping[str, float],
    memory_bytes_s: float,
    intra_bytes_s: float,
    inter_bytes_s: float,
) -> NodeKind:
    return NodeKind(
        name=name,
        devices=devices,
        memory_bytes=int(memory_bytes),
        peak_flops=peak_flops,
        memory_bandwidth_bytes_s=memory_bytes_s,
        intra_node=Link(intra_bytes_s, _INTRA_LATENCY_S),
        inter_node=Link(inter_bytes_s, _INTER_LATENCY_S),
        storage=Link(_STORAGE_BYTES_S, _STORAGE_LATENCY_S),
        accelerator=True,
    )


# Links in bytes/s each way: `intra` per device (half of the vendors' figure, which adds both ways), `inter` per node.
_CATALOG = {
    # One GCD is a device. Peaks: AMD Instinct MI250X data sheet (383 and 95.7 TFLOP/s, 3.2 TB/s for two GCDs); the
    # float32 and float64 ones are those of its matrix units.
    "mi250x-slingshot": _Entry(
        _kind(
            "mi250x-slingshot",
            devices=8,
            memory_bytes=64 * 2**30,
            peak_flops=_flops(191.5e12, 47.85e12, 47.85e12),
            memory_bytes_s=1.6e12,
            intra_bytes_s=200e9,
            inter_bytes_s=4 * 25e9,
        ),
        num_nodes=128,
    ),
    # NVIDIA A100 data sheet: 312 TFLOP/s bfloat16, 19.5 float32 (without TF32) and float64 on tensor cores. The 64 GB
    # part is the custom one of the Leonardo system with 1.64 TB/s (Turisini et al. 2023, arXiv:2307.16885).
    "a100-64gb-hdr": _Entry(
        _kind(
            "a100-64gb-hdr",
            devices=4,
            memory_bytes=64 * 2**30,
            peak_flops=_flops(312e12, 19.5e12, 19.5e12),
            memory_bytes_s=1.64e12,
            intra_bytes_s=300e9,
            inter_bytes_s=4 * 12.5e9,
        ),
        num_nodes=64,
    ),
    # NVIDIA H200 data sheet, SXM: 989 TFLOP/s bfloat16 dense, 67 float32 and float64 on tensor cores, 4.8 TB/s.
    "h200-hdr": _Entry(
        _kind(
            "h200-hdr",
            devices=8,
            memory_bytes=141e9,
            peak_flops=_flops(989e12, 67e12, 67e12),
            memory_bytes_s=4.8e12,
            intra_bytes_s=450e9,
            inter_bytes_s=25e9,
        ),
        num_nodes=8,
    ),
    # NVIDIA H100 data sheet, SXM (3.35 TB/s, 80 GB); DGX H100 user guide: eight 400 Gb/s network ports for computing.
    "h100-dgx": _Entry(
        _kind(
            "h100-dgx",
            devices=8,
            memory_bytes=80 * 2**30,
            peak_flops=_flops(989e12, 67e12, 67e12),
            memory_bytes_s=3.35e12,
            intra_bytes_s=450e9,
            inter_bytes_s=8 * 50e9,
        ),
        num_nodes=16,
    ),
}


def list_clusters() -> list[str]:
    """Return the names of the catalog."""
    return sorted(_CATALOG)


def cluster_preset(name: str, num_devices: int | None = None) -> Cluster:
    """Return a cluster of the catalog, or its first `num_devices` devices; more of them add nodes of the same kind.

    Raises:
        ValueError: there is no such preset, or the number isn't from 1 to MOST_DEVICES.
    """
    entry = _CATALOG.get(name)
    if entry is None:
        raise ValueError(f"cluster.preset is {name!r}, which there is not; choose one of {', '.join(list_clusters())}.")
    if num_devices is None:
        num_devices = entry.num_nodes * entry.kind.devices
    if not 1 <= num_devices <= MOST_DEVICES:
        raise ValueError(f"cluster.devices is {num_devices}; choose from 1 to {MOST_DEVICES}.")
    return uniform_cluster(entry.kind, num_devices)
