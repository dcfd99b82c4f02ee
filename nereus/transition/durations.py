"""Seconds of the parts of a transition: each primitive on links or storage, set-up of communicators, verification."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from nereus.layout import Layout
from nereus.model.spec import ModelSpec, tensors
from nereus.plan import stage_of
from nereus.staged_state import PREFIXES, grid
from nereus.transition.local import GENERATION, TRAINING
from nereus.transition.memory import TransitionMemory
from nereus.transition.moves import setup_messages
from nereus.transition.overlap import common_elements, held_elements
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.speeds import Speeds


def durations(graph: TransitionGraph, memory: TransitionMemory, speeds: Speeds) -> dict[str, float]:
    """Return by id the seconds of each primitive before the commit, alone on its devices."""
    seconds: dict[str, float] = {}
    known: dict[tuple[Any, ...], float] = {}
    for primitive in graph.primitives:
        if not primitive.after_commit:
            shape = _shape(primitive, speeds.node_of)
            if shape not in known:
                known[shape] = primitive_seconds(primitive, memory, speeds)
            seconds[primitive.id] = known[shape]
    return seconds


def _shape(primitive: Primitive, node_of: Callable[[int], int]) -> tuple[Any, ...]:
    """Return what settles the seconds of a primitive: equal where only the names of devices and nodes differ."""
    place = {device: number for number, device in enumerate(primitive.devices)}
    nodes: dict[int, int] = {}
    return (
        primitive.kind,
        primitive.model_stage,
        primitive.bytes,
        *[nodes.setdefault(node_of(device), len(nodes)) for device in primitive.devices],
        *[(unit.layout, *map(place.get, unit.devices)) for unit in (*primitive.reads, *primitive.makes)],
        len(primitive.reads),
        *map(place.get, primitive.shares),
    )


def primitive_seconds(primitive: Primitive, memory: TransitionMemory, speeds: Speeds) -> float:
    """Return the seconds of one primitive.

    Senders share the load evenly; a target takes what it lacks from its own node where it can. The slowest device or
    node decides.
    """
    return speeds.command_s + _work_seconds(primitive, memory, speeds)


def _work_seconds(primitive: Primitive, memory: TransitionMemory, speeds: Speeds) -> float:
    if primitive.kind == "destroy" or not (primitive.bytes or primitive.makes):
        return 0.0
    if primitive.kind == "stage":
        nodes = {speeds.node_of(device) for device in primitive.devices}
        return speeds.write.seconds(primitive.bytes / len(nodes))
    loads = _Loads(primitive, memory, speeds.node_of)
    copied = float(loads.local.max(initial=0.0)) / speeds.copy_bytes_s
    if primitive.kind == "restore":
        return copied + _read_seconds(loads, speeds)
    if not primitive.bytes:
        return copied
    senders = sorted({device for unit in primitive.reads for device in unit.devices})
    sending_nodes = len({speeds.node_of(device) for device in senders})
    far = max(max(loads.by_node(loads.far), default=0.0), float(loads.far.sum()) / sending_nodes)
    far_s = speeds.far.seconds(far) if far else 0.0
    return copied + max(_near_seconds(loads, senders, speeds), far_s)


def _read_seconds(loads: _Loads, speeds: Speeds) -> float:
    """Return what reading from storage takes: the node with most to read decides, or the device."""
    read = loads.near + loads.far
    if not read.any():
        return 0.0
    of_node = speeds.read.seconds(max(loads.by_node(read)))
    return max(of_node, speeds.read.latency_s + float(read.max()) / speeds.read_device_bytes_s)


def storage_seconds(graph: TransitionGraph, memory: TransitionMemory, speeds: Speeds) -> float:
    """Return the least seconds in which all that a graph writes and reads can pass: nodes share what carries it.

    Stages and restores run at the same time, and each alone takes what `primitive_seconds` says.
    """
    written: dict[int, float] = defaultdict(float)
    read: dict[int, float] = defaultdict(float)
    for primitive in graph.primitives:
        if primitive.kind == "stage" and primitive.bytes:
            nodes = {speeds.node_of(device) for device in primitive.devices}
            for node in nodes:
                written[node] += speeds.write.seconds(primitive.bytes / len(nodes))
        elif primitive.kind == "restore" and primitive.makes:
            loads = _Loads(primitive, memory, speeds.node_of)
            for node, load in zip(np.unique(loads.nodes), loads.by_node(loads.near + loads.far), strict=True):
                read[int(node)] += speeds.read.seconds(load) if load else 0.0
    pairs = [(written[node], read[node]) for node in {*written, *read}]
    return max((max(pair) + speeds.storage_shared * min(pair) for pair in pairs), default=0.0)


def _near_seconds(loads: _Loads, senders: list[int], speeds: Speeds) -> float:
    """Return what the device takes that sends and receives longest, to and from others of its node."""
    if not loads.near.any():
        return 0.0
    share = float(loads.near.sum()) / len(senders)
    received = np.append(loads.near, 0.0)  # the last one only sends
    sent = np.append(np.where(np.isin(loads.devices, senders), share, 0.0), share)
    at_once, one_way = np.minimum(sent, received), np.abs(sent - received)
    both, near = speeds.near_both or speeds.near, speeds.near
    seconds = at_once / both.bandwidth_bytes_s + one_way / near.bandwidth_bytes_s
    return near.latency_s + float(seconds.max())


class _Loads:
    """Bytes by target device of a primitive: copied inside it, from others of its node, and from further away."""

    def __init__(self, primitive: Primitive, memory: TransitionMemory, node_of: Callable[[int], int]) -> None:
        spec, target = memory.specs[primitive.model_stage], primitive.makes[0].layout
        shared = set(primitive.shares)
        places = [(d, r) for unit in primitive.makes for r, d in enumerate(unit.devices) if d not in shared]
        self.devices = np.array([device for device, _ in places], dtype=np.int64)
        self.nodes = np.array([node_of(device) for device, _ in places], dtype=np.int64)
        ranks = np.array([rank for _, rank in places], dtype=np.int64)
        wanted = held_elements(spec, target)[ranks]
        local = near = np.zeros(len(places), dtype=np.int64)
        if primitive.reads and places:
            common = common_elements(spec, primitive.reads[0].layout, target)
            old = {device: rank for unit in primitive.reads for rank, device in enumerate(unit.devices)}
            here = np.array([old.get(device, -1) for device, _ in places])
            local = np.where(here >= 0, common[here, ranks], 0)
            if primitive.kind != "restore":
                on_node: dict[int, set[int]] = {}
                for device, rank in old.items():
                    on_node.setdefault(node_of(device), set()).add(rank)
                sums = {node: common[sorted(there)].sum(axis=0) for node, there in on_node.items()}
                there = [sums[n][r] if n in sums else 0 for n, r in zip(self.nodes, ranks, strict=True)]
                near = np.minimum(np.array(there), wanted) - local
        count = float(memory.element_bytes(primitive.model_stage))
        self.local, self.near, self.far = local * count, near * count, (wanted - local - near) * count

    def by_node(self, load: np.ndarray) -> list[float]:
        """Return the sums of a load over the devices of each node."""
        return [float(load[self.nodes == node].sum()) for node in np.unique(self.nodes)]


def setup_seconds(graph: TransitionGraph, speeds: Speeds) -> float:
    """Return the seconds of setting up the new communicators: each device joins its own one after the other."""
    messages: dict[int, float] = {}
    changed = {primitive.model_stage for primitive in graph.primitives}
    for primitive in graph.primitives:
        for unit in primitive.makes:
            inside = setup_messages(unit.layout.tp) + setup_messages(unit.layout.pp)
            for device in unit.devices:
                messages[device] = messages.get(device, 0.0) + inside
    for name in changed:
        across = setup_messages(graph.target[name].dp) if stage_of(name) == "training" else 0.0
        for device in graph.target[name].devices:
            messages[device] = messages.get(device, 0.0) + across
    if not changed.isdisjoint((GENERATION, TRAINING)):
        actor = {
            device for name in (GENERATION, TRAINING) if name in graph.target for device in graph.target[name].devices
        }
        for device in actor:
            messages[device] = messages.get(device, 0.0) + setup_messages(len(actor))
    return max(messages.values(), default=0.0) * speeds.setup_s


def verify_seconds(graph: TransitionGraph, memory: TransitionMemory, speeds: Speeds) -> float:
    """Return the seconds of summing up the state of all that changes, before and after."""
    changed = {primitive.model_stage for primitive in graph.primitives}
    total = 0.0
    for plan in (graph.current, graph.target):
        loads: dict[int, float] = {}
        for name in changed:
            layout = plan[name].layout
            seconds = memory.wanted(name, layout) / speeds.verify_bytes_s
            seconds += num_pieces(name, memory.specs[name], layout) * speeds.verify_piece_s
            for index, device in enumerate(plan[name].devices):
                loads[device] = loads.get(device, 0.0) + float(seconds[index % layout.size])
        total += max(loads.values(), default=0.0)
    return total


@lru_cache(maxsize=4096)
def num_pieces(model_stage: str, spec: ModelSpec, layout: Layout) -> float:
    """Return about how many pieces of the checksums' grid a rank holds."""
    infos = tensors(spec).values()
    by_tp = sum(len(grid(info, spec.kv_heads)) / (layout.tp if info.split else 1) for info in infos)
    return (len(PREFIXES) if stage_of(model_stage) == "training" else 1) * by_tp / layout.pp
