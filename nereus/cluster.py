"""The devices a run may use: where they are, what they hold, and how fast they reach each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class Link:
    """A way for bytes: a message of n bytes takes `latency_s + n / bandwidth_bytes_s`."""

    bandwidth_bytes_s: float
    latency_s: float

    def seconds(self, num_bytes: float, num_messages: int = 1) -> float:
        """Return the time that `num_bytes` take in `num_messages` messages at the nominal bandwidth."""
        return num_messages * self.latency_s + num_bytes / self.bandwidth_bytes_s


# FLOP/s of one current server core, until a start-up probe has measured the one at hand.
LOCAL_CORE_FLOPS = {"float32": 113e9, "bfloat16": 500e9, "float64": 56e9}


@dataclass(frozen=True)
class NodeKind:
    """One kind of machine, with nominal numbers; what is really reached is learned as an efficiency elsewhere.

    `peak_flops` is per device in FLOP/s, keyed by dtype ("float32", "bfloat16", "float64"). Links are each way:
    `intra_node` of one device to the others of its node, `inter_node` of one node to all others, shared by its
    devices, `storage` of one node to the staging storage. `accelerator` is false where devices are slots of a CPU.
    """

    name: str
    devices: int
    memory_bytes: int
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_s: float
    intra_node: Link
    inter_node: Link
    storage: Link
    accelerator: bool = False


@dataclass(frozen=True, order=True)
class Device:
    """One device: its id keeps its meaning for the whole run; `node` counts from 0; `memory_bytes` is its capacity."""

    id: int
    node: int
    memory_bytes: int


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, ordered by node: neighbours in the order are close to each other."""

    kind: NodeKind
    devices: tuple[Device, ...]

    def __post_init__(self) -> None:
        ids = [device.id for device in self.devices]
        assert len(set(ids)) == len(ids), ids
        nodes = [device.node for device in self.devices]
        assert nodes == sorted(nodes), "devices must be ordered by node"

    @cached_property
    def _by_id(self) -> dict[int, Device]:
        return {device.id: device for device in self.devices}

    @property
    def device_ids(self) -> tuple[int, ...]:
        return tuple(device.id for device in self.devices)

    @property
    def num_nodes(self) -> int:
        return len({device.node for device in self.devices})

    @property
    def capacities(self) -> dict[int, int]:
        """Per device id its memory in bytes."""
        return {device.id: device.memory_bytes for device in self.devices}

    def node_of(self, device_id: int) -> int:
        return self._by_id[device_id].node

    def memory_bytes(self, device_id: int) -> int:
        return self._by_id[device_id].memory_bytes

    def link_between(self, a: int, b: int) -> Link:
        """Return the link between two devices; a copy inside one device runs at its memory bandwidth."""
        if a == b:
            return Link(self.kind.memory_bandwidth_bytes_s, 0.0)
        return self.kind.intra_node if self.node_of(a) == self.node_of(b) else self.kind.inter_node

    def only(self, device_ids: Iterable[int]) -> Cluster:
        """Return the cluster that is left of this one when just `device_ids` live; an id it hasn't is an error."""
        wanted = set(device_ids)
        unknown = sorted(wanted - set(self.device_ids))
        if unknown:
            raise ValueError(
                f"device {unknown[0]} isn't in the cluster of {len(self.devices)} devices "
                f"({', '.join(map(str, self.device_ids))}); name devices that are."
            )
        return replace(self, devices=tuple(device for device in self.devices if device.id in wanted))


def uniform_cluster(kind: NodeKind, num_devices: int) -> Cluster:
    """Return `num_devices` devices of one kind, ids from 0, node after node."""
    devices = tuple(Device(i, i // kind.devices, kind.memory_bytes) for i in range(num_devices))
    return Cluster(kind, devices)


def local_cluster(
    num_devices: int, memory_per_device_bytes: int | None = None, *, threads_per_device: int = 1
) -> Cluster:
    """Return this machine as one node.

    Args:
        memory_per_device_bytes: what a worker may hold; None shares 90% of the memory that is available now.
    """
    if num_devices < 1:
        raise ValueError(f"cluster.devices is {num_devices}; use at least 1.")
    if memory_per_device_bytes is None:
        memory_per_device_bytes = int(look_at_machine().memory_bytes * 0.9) // num_devices
    return uniform_cluster(_local_kind(num_devices, memory_per_device_bytes, threads_per_device), num_devices)


def _local_kind(num_devices: int, memory_bytes: int, threads_per_device: int) -> NodeKind:
    """Return a CPU machine with the rates of one current server core; a start-up probe may replace them."""
    return NodeKind(
        name="local",
        devices=num_devices,
        memory_bytes=memory_bytes,
        peak_flops={dtype: flops * threads_per_device for dtype, flops in LOCAL_CORE_FLOPS.items()},
        memory_bandwidth_bytes_s=40e9 / num_devices,
        intra_node=Link(bandwidth_bytes_s=4.8e9, latency_s=2e-4),
        inter_node=Link(bandwidth_bytes_s=1.25e9, latency_s=5e-4),
        storage=Link(bandwidth_bytes_s=1.3e9, latency_s=1e-3),
    )


@dataclass(frozen=True)
class Machine:
    """What this process may use of its machine now: cores, and bytes of memory that are free or reclaimable."""

    cores: int
    memory_bytes: int


def look_at_machine(root: Path = Path("/")) -> Machine:
    """Return the cores and memory that are left to this process: the least of the kernel's and its cgroups' limits.

    Args:
        root: where `proc` and `sys/fs/cgroup` are; tests give a folder of their own.
    """
    limits = [memory for memory in (_free_memory(root), *_cgroup_memory(root)) if memory is not None]
    return Machine(cores=len(os.sched_getaffinity(0)), memory_bytes=min(limits, default=2**30))


def _free_memory(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_memory(root: Path) -> list[int]:
    """Return what is left below the limit of each cgroup (v1 or v2) between this process and the root."""
    left = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit, usage = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = base / path.strip("/")
        # In a container the path may be the host's, of which only the mount's root is visible.
        for group in (folder, *folder.parents):
            if base in (group, *group.parents):
                left += _below_limit(group, limit, usage)
    return left


def _below_limit(group: Path, limit: str, usage: str) -> list[int]:
    most, used = _read(group / limit).strip(), _read(group / usage).strip()
    if not most.isdigit() or not used.isdigit() or int(most) >= 2**60:
        return []
    # Cached file pages count as used but are given back under pressure.
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines() if len(line.split()) == 2)
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return [max(0, int(most) - int(used) + reclaimable)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
