"""Devices, links, and what the machine has left under its control groups."""

import os
from pathlib import Path

import pytest

from nereus.cluster import Link, Machine, NodeKind, local_cluster, look_at_machine, uniform_cluster

GIB = 2**30
KIND = NodeKind(
    name="pair",
    devices=2,
    memory_bytes=64 * GIB,
    peak_flops={"bfloat16": 312e12},
    memory_bandwidth_bytes_s=1.6e12,
    intra_node=Link(300e9, 1e-5),
    inter_node=Link(25e9, 2e-5),
    storage=Link(2e9, 1e-3),
)


def test_devices_are_numbered_node_after_node():
    cluster = uniform_cluster(KIND, 5)
    assert [cluster.node_of(d) for d in cluster.device_ids] == [0, 0, 1, 1, 2]
    assert cluster.num_nodes == 3
    assert cluster.capacities == dict.fromkeys(range(5), 64 * GIB)


def test_the_link_follows_from_where_two_devices_are():
    cluster = uniform_cluster(KIND, 4)
    assert cluster.link_between(0, 1) == KIND.intra_node
    assert cluster.link_between(1, 2) == KIND.inter_node
    assert cluster.link_between(3, 3) == Link(1.6e12, 0.0)
    assert cluster.link_between(1, 2).seconds(25e9, num_messages=100) == pytest.approx(1.002)


def test_lost_devices_leave_the_others_their_ids_and_nodes():
    left = uniform_cluster(KIND, 4).only([3, 0])
    assert left.device_ids == (0, 3) and left.node_of(3) == 1
    with pytest.raises(ValueError, match="device 9 isn't in the cluster of 4 devices"):
        uniform_cluster(KIND, 4).only([9])


def test_this_machine_is_one_node_and_shares_what_is_free():
    assert local_cluster(3, 2 * GIB).capacities == {0: 2 * GIB, 1: 2 * GIB, 2: 2 * GIB}
    assert local_cluster(3).num_nodes == 1
    assert 0 < 4 * local_cluster(4).memory_bytes(0) < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with pytest.raises(ValueError, match=r"cluster\.devices is 0"):
        local_cluster(0)


def _machine(root: Path, files: dict[str, str]) -> Machine:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return look_at_machine(root)


MEMINFO = {"proc/meminfo": "MemTotal: 999 kB\nMemAvailable: 8388608 kB\n"}


def test_without_control_groups_the_available_memory_counts(tmp_path):
    assert _machine(tmp_path, MEMINFO).memory_bytes == 8 * GIB


def test_the_tightest_group_of_version_2_counts_and_cached_files_are_free(tmp_path):
    group = "sys/fs/cgroup/jobs"
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {GIB}\n",
        f"{group}/mine/memory.max": "max\n",
        f"{group}/mine/memory.current": "0\n",
    }
    assert _machine(tmp_path, MEMINFO | files).memory_bytes == 2 * GIB


def test_a_container_sees_its_group_of_version_1_at_the_root(tmp_path):
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
        f"{base}/memory.limit_in_bytes": str(2 * GIB),
        f"{base}/memory.usage_in_bytes": str(GIB),
        f"{base}/memory.stat": "total_inactive_file 0\n",
    }
    assert _machine(tmp_path, MEMINFO | files).memory_bytes == GIB


def test_a_group_of_version_1_without_a_limit_limits_nothing(tmp_path):
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        f"{base}/memory.limit_in_bytes": "9223372036854771712",
        f"{base}/memory.usage_in_bytes": "1",
    }
    assert _machine(tmp_path, MEMINFO | files).memory_bytes == 8 * GIB
