"""A short look, on running workers, at how fast this machine computes, and moves the bytes of a transition."""

from __future__ import annotations

import contextlib
import re
import statistics
import time
import uuid
from collections.abc import Sequence

import torch

from nereus.cluster import LOCAL_CORE_FLOPS, Link, NodeKind
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.model_stages import next_epoch
from nereus.runtime.probe_compute import ComputeOrder, ComputeSpeeds
from nereus.runtime.probe_work import ProbeOrder, ProbeResult
from nereus.transition.assign import one_node
from nereus.transition.speeds import Speeds
from storage.small_files import list_names, remove_files, remove_folder
from storage.urls import join_url

# Storage that hangs is given up after this long; then the transition is priced with what it did until then.
STORAGE_LIMIT_S = 2.0
_LEAST_BYTES_S = 1e3
_FOLDER = re.compile(r"probe-[0-9a-f]{32}-\d+")


def measure_speeds(
    engine: Engine,
    devices: Sequence[int],
    staging_root: str,
    *,
    device_type: str,
    same_host: bool = True,
    storage_limit_s: float = STORAGE_LIMIT_S,
) -> Speeds:
    """Return what the workers of these devices reach, each way, while all of them move bytes; in a few hundred ms.

    Args:
        engine: with running workers whose service has the command `probe`.
        staging_root: where staged state is written; nothing stays there.
        device_type: of the workers, "cpu" or "cuda".
        same_host: False measures links as between hosts, without shared memory.
        storage_limit_s: most seconds for storage.

    Raises:
        CommandError: a worker was lost or failed. Slow or broken storage is no failure, only slow.
    """
    assert device_type in ("cpu", "cuda"), device_type
    ranks, epoch, name = tuple(sorted(devices)), next_epoch(), f"probe-{uuid.uuid4().hex}"
    orders = {
        device: ProbeOrder(ranks, epoch, join_url(staging_root, f"{name}-{device}"), storage_limit_s, same_host)
        for device in ranks
    }
    kwargs = {device: {"order": order} for device, order in orders.items()}
    remove_leftovers(staging_root)
    begun = time.perf_counter()
    try:
        results = list(run_command(engine, "probe", kwargs, label="probe", step=None).values())
    except BaseException:
        remove_leftovers(staging_root)
        raise
    passed_s = time.perf_counter() - begun
    return combine(results, command_s=max(0.0, passed_s - max(result.seconds for result in results)))


def remove_leftovers(staging_root: str) -> None:
    """Remove what probes have left whose worker has ended; what the store doesn't let go stays till the next one."""
    with contextlib.suppress(Exception):  # every store has errors of its own
        for name in filter(_FOLDER.fullmatch, list_names(staging_root)):
            folder = join_url(staging_root, name)
            remove_files([join_url(folder, file) for file in list_names(folder)])
            remove_folder(folder)


def measure_machine(
    engine: Engine,
    devices: Sequence[int],
    speeds: Speeds,
    *,
    device_type: str,
    precision: str,
    memory_bytes: int,
) -> NodeKind:
    """Return this host as a kind of node, with what its devices reach while all of them work; in some 100 ms.

    Args:
        engine: with running workers whose service has the command `probe_compute`.
        devices: that are measured: as many as work together, since they share memory and perhaps cores.
        speeds: of the same devices, as `measure_speeds` has found them; links and storage are theirs.
        device_type: of the workers, "cpu" or "cuda".
        precision: of the run; of other precisions the rates are guessed from its own.
        memory_bytes: of each device.

    Raises:
        CommandError: a worker was lost or failed.
    """
    assert device_type in ("cpu", "cuda"), device_type
    ranks = tuple(sorted(devices))
    order = ComputeOrder(ranks, next_epoch(), getattr(torch, precision))
    kwargs = {device: {"order": order} for device in ranks}
    results: list[ComputeSpeeds] = list(run_command(engine, "probe_compute", kwargs, label="probe", step=None).values())
    faster = min(result.flops for result in results) / LOCAL_CORE_FLOPS[precision]
    return NodeKind(
        name="this host",
        devices=len(ranks),
        memory_bytes=memory_bytes,
        peak_flops={dtype: flops * faster for dtype, flops in LOCAL_CORE_FLOPS.items()},
        memory_bandwidth_bytes_s=min(result.read_bytes_s for result in results),
        intra_node=speeds.near,
        inter_node=speeds.far,
        storage=speeds.write,
        accelerator=device_type == "cuda",
    )


def combine(results: Sequence[ProbeResult], *, command_s: float) -> Speeds:
    """Return the speeds of one node from what its devices have measured at the same time.

    The slowest device counts, since it decides when a transition is done; storage is shared by all of them.
    """
    copy, verify = (_slowest([getattr(r, part) for r in results]) for part in ("copy", "verify"))
    one_way = [r.one_way for r in results if r.one_way is not None]
    both_ways = [r.both_ways for r in results if r.both_ways is not None]
    near = _slowest(one_way) if one_way else copy
    near_both = _slowest(both_ways) if both_ways else copy
    return Speeds(
        node_of=one_node,
        near=near,
        near_both=near_both,
        far=near,
        write=_shared([r.storage.write for r in results]),
        read=_shared([r.storage.read for r in results]),
        copy_bytes_s=copy.bandwidth_bytes_s,
        setup_s=max(r.setup_s for r in results),
        verify_bytes_s=verify.bandwidth_bytes_s,
        verify_piece_s=verify.latency_s,
        command_s=command_s,
        commit_s=statistics.median(r.storage.record_s for r in results),
        read_device_bytes_s=max(_LEAST_BYTES_S, min(r.storage.read_cores_bytes_s for r in results)),
        storage_shared=statistics.median(r.storage.shared for r in results),
    )


def _slowest(links: Sequence[Link]) -> Link:
    return Link(
        max(_LEAST_BYTES_S, min(link.bandwidth_bytes_s for link in links)), max(link.latency_s for link in links)
    )


def _shared(links: Sequence[Link]) -> Link:
    """Return the link of a node from what its devices have had of it at the same time."""
    slowest = _slowest(links)
    return Link(slowest.bandwidth_bytes_s * len(links), slowest.latency_s)
