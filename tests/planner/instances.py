"""Random small jobs and clusters for the planner's tests: tight memory, uneven shares, missing model-stages."""

from __future__ import annotations

import random
from dataclasses import replace

from nereus.cluster import Cluster, Device, Link, NodeKind
from nereus.cost.efficiency import CLASSES, Efficiencies
from nereus.cost.load import StepLoad
from nereus.cost.step import JobSpec
from nereus.model.spec import ModelSpec
from nereus.planner.setting import Setting

GIB = 2**30


def random_setting(seed: int, *, most_devices: int = 6, least_devices: int = 1) -> Setting:
    """Return a job on a cluster of a few devices, some nodes of which have lost one; equal for equal seeds."""
    draw = random.Random(seed)
    spec = random_spec(draw)
    specs = {"actor.generation": spec, "actor.training": spec}
    if draw.random() < 0.7:
        specs["critic.training"] = replace(spec, head="value")
    if draw.random() < 0.8:
        specs["reference.inference"] = spec
    if draw.random() < 0.6:
        specs["reward.inference"] = replace(spec, head="score")
    mean = draw.choice([64.0, 300.0, 1500.0])
    samples = draw.choice([5, 12, 32])
    load = StepLoad(
        samples,
        minibatches=draw.choice([1, 2, 4]),
        prompt_tokens=draw.choice([32, 200]),
        response_tokens=mean,
        response_tokens_p95=mean * draw.choice([1.0, 1.3]),
    )
    precision = draw.choice(["bfloat16", "float32"])
    job = JobSpec(specs, load, precision, staging=draw.random() < 0.5)
    cluster = random_cluster(draw, specs, precision, draw.randint(least_devices, most_devices))
    setting = Setting.of(job, cluster, random_efficiencies(draw, cluster), memory_factor=draw.choice([1.0, 1.1]))
    # Staging buffers are small; now and then they are not, so that it shows where they are counted.
    buffer = draw.choice([setting.workload.staging_buffer_bytes, GIB // 4])
    job = replace(job, most_micro_batch=draw.choice([None, None, 1, 3]))
    return replace(setting, job=job, workload=replace(setting.workload, staging_buffer_bytes=buffer))


def random_spec(draw: random.Random) -> ModelSpec:
    kv_heads = draw.choice([1, 2, 3, 4])
    return ModelSpec(
        "llama",
        vocab=draw.choice([1000, 32_000]),
        hidden=draw.choice([256, 1024]),
        layers=draw.choice([2, 3, 6]),
        heads=kv_heads * draw.choice([1, 2]),
        kv_heads=kv_heads,
        head_dim=64,
        intermediate=draw.choice([512, 3000]),
        tie_embeddings=draw.random() < 0.3,
    )


def random_cluster(draw: random.Random, specs: dict[str, ModelSpec], precision: str, num_devices: int) -> Cluster:
    """Return devices with memory for a random part of all the model-stages' states."""
    from nereus.model.spec import num_parameters

    total = sum(num_parameters(spec) * (18 if "training" in name else 3) for name, spec in specs.items())
    memory = int(total * (2 if precision == "float32" else 1) * draw.uniform(1.0, 8.0) / num_devices) + GIB
    kind = NodeKind(
        name="test",
        devices=draw.choice([2, 4, 8]),
        memory_bytes=memory,
        peak_flops={"bfloat16": 2e12, "float32": 1e12, "float64": 5e11},
        memory_bandwidth_bytes_s=2e11,
        intra_node=Link(5e9, 1e-5),
        inter_node=Link(1e9, 5e-5),
        storage=Link(draw.choice([1e7, 1e9]), 1e-3),
        accelerator=draw.random() < 0.5,
    )
    ids = range(num_devices) if draw.random() < 0.7 else sorted(draw.sample(range(num_devices + 2), num_devices))
    return Cluster(kind, tuple(Device(i, i // kind.devices, memory) for i in ids))


def random_efficiencies(draw: random.Random, cluster: Cluster) -> Efficiencies:
    slow = {draw.choice(cluster.device_ids): draw.choice([1.5, 3.0])} if draw.random() < 0.3 else {}
    return Efficiencies(
        {name: draw.uniform(0.2, 0.8) for name in CLASSES},
        {name: draw.choice([0.0, 1e-5, 1e-3]) for name in CLASSES},
        host_s=draw.choice([1e-4, 3e-3]),
        device_factor=slow,
    )
