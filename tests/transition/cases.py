"""Random plans on few devices, and the memory of devices that are nearly full: what graphs are tested on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from nereus.cost.rank_memory import Workload
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import MODEL_STAGES, Plan, StagePlan
from nereus.transition.memory import TransitionMemory, resident_bytes

SPEC = ModelSpec("llama", 64, 24, 6, 6, 6, 4, 48)
SPECS = {
    name: replace(SPEC, head=head)
    for name, head in zip(MODEL_STAGES, ("lm", "lm", "value", "lm", "score"), strict=True)
}
WORKLOAD = Workload(samples_per_step=8, minibatches=1, prompt_tokens=4, response_tokens=4)
# Small against the tiny model, as the real ones are against real models.
BUFFER_BYTES = 500
# What a device needs beside the target's units, so that each of them can be made where nothing else is.
LEAST_ROOM = 2 * BUFFER_BYTES


def stage(dp: int, tp: int, pp: int, devices: Sequence[int] = (), *, first: int = 0) -> StagePlan:
    """Return a StagePlan; without `devices` on consecutive ones from `first` on."""
    return StagePlan(dp, Layout(tp, pp), tuple(devices) or tuple(range(first, first + dp * tp * pp)), 1)


def random_stage(rng: random.Random, num_devices: int) -> StagePlan:
    tp, pp = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4])
    if tp * pp > num_devices:
        tp = pp = 1
    dp = rng.randint(1, num_devices // (tp * pp))
    first = rng.randint(0, num_devices - dp * tp * pp)
    devices = list(range(first, num_devices))
    if rng.random() < 0.5:
        devices = list(range(num_devices))
        rng.shuffle(devices)
    return stage(dp, tp, pp, devices[: dp * tp * pp])


def random_plan(rng: random.Random, num_devices: int, names: Sequence[str] = MODEL_STAGES) -> Plan:
    return Plan.of({name: random_stage(rng, num_devices) for name in names})


def memory_for(current: Plan, target: Plan, room: int) -> TransitionMemory:
    """Return devices that hold either plan's units and `room` bytes more."""
    devices = sorted({*current.devices, *target.devices})
    memory = memory_of(dict.fromkeys(devices, 0))
    held = [resident_bytes(plan, memory, devices) for plan in (current, target)]
    return replace(memory, usable_bytes={d: max(held[0][d], held[1][d]) + room for d in devices})


def memory_of(usable_bytes: dict[int, int]) -> TransitionMemory:
    return TransitionMemory(
        SPECS,
        WORKLOAD,
        "float32",
        usable_bytes,
        transfer_buffer_bytes=BUFFER_BYTES,
        restore_buffer_bytes=BUFFER_BYTES,
    )
