"""Bytes of a transition: what units hold, what a conversion in place needs at its worst moment, and what devices allow.

Units hold at the boundary between steps exactly what the memory model calls resident; no phase runs meanwhile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from nereus.cost.activations import COMPUTE_BYTES, lifted_bytes
from nereus.cost.memory import USABLE_SHARE, fits
from nereus.cost.rank_memory import Precision, Workload, estimate_rank
from nereus.layout import Layout
from nereus.limits import RESTORE_BUFFER_BYTES
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan, stage_of
from nereus.transition.chunks import chunk_elements, chunk_order
from nereus.transition.overlap import common_elements, held_elements
from nereus.transition.primitives import TRANSFER_BUFFER_BYTES


@dataclass(frozen=True)
class TransitionMemory:
    """What is needed to know the bytes of any primitive.

    Attributes:
        usable_bytes: by device id, what units and buffers may hold in all: the cap less what the worker itself needs.
        admits: whether a plan also fits while its steps run; asked of rank orders that nobody has checked yet.
        transfer_buffer_bytes: most bytes of buckets that a device has in one primitive, to send and to receive each.
        restore_buffer_bytes: most bytes that the reader of staged state holds beside the tensors that it fills.
    """

    specs: Mapping[str, ModelSpec]
    workload: Workload
    precision: Precision
    usable_bytes: Mapping[int, int]
    admits: Callable[[Plan], bool] = lambda plan: True
    transfer_buffer_bytes: int = TRANSFER_BUFFER_BYTES
    restore_buffer_bytes: int = RESTORE_BUFFER_BYTES

    @classmethod
    def of(
        cls,
        specs: Mapping[str, ModelSpec],
        workload: Workload,
        precision: Precision,
        capacities: Mapping[int, int],
    ) -> TransitionMemory:
        """Return what the memory model allows: 90% of each device, less workspace and the staging writer's buffers.

        Args:
            capacities: bytes by device id, of all devices of both plans.
        """
        fixed = workload.workspace_bytes + workload.staging_buffer_bytes
        usable = {device: int(USABLE_SHARE * capacity) - fixed for device, capacity in capacities.items()}
        return cls(specs, workload, precision, usable, lambda plan: fits(plan, specs, workload, precision, capacities))

    def takes(self, plan: Plan) -> bool:
        """Return whether a plan's units can be read from storage one after the other, and its steps fit."""
        devices = plan.devices
        need = resident_bytes(plan, self, devices)
        buffers = dict.fromkeys(devices, 0)
        for name, stage in plan.items():
            reads = np.minimum(self.restore_buffer_bytes, self.wanted(name, stage.layout)).tolist()
            for device, count in zip(stage.devices, itertools.cycle(reads)):
                if count > buffers[device]:
                    buffers[device] = count
        fits_beside = all(count + buffers[device] <= self.usable_bytes[device] for device, count in need.items())
        return fits_beside and self.admits(plan)

    def element_bytes(self, model_stage: str) -> int:
        """Return the bytes of an element's state that travel: master and moments, or the parameter to compute with."""
        if stage_of(model_stage) == "training":
            return 3 * lifted_bytes(self.precision)
        return COMPUTE_BYTES[self.precision]

    def held(self, model_stage: str, layout: Layout) -> tuple[int, ...]:
        """Return by rank the bytes that a unit holds."""
        return _held(model_stage, self.specs[model_stage], layout, self.workload, self.precision)

    def lacking(self, model_stage: str, source: Layout, target: Layout) -> np.ndarray:
        """Return int64 [source.size, target.size]: bytes that a target rank lacks where a source rank is."""
        spec = self.specs[model_stage]
        held, common = held_elements(spec, target), common_elements(spec, source, target)
        return (held[None, :] - common) * self.element_bytes(model_stage)

    def wanted(self, model_stage: str, layout: Layout) -> np.ndarray:
        """Return int64 [layout.size]: the bytes that fill a rank which starts from nothing."""
        return held_elements(self.specs[model_stage], layout) * self.element_bytes(model_stage)

    def in_place_peak(
        self, model_stage: str, layouts: tuple[Layout, Layout], old_rank: int | None, new_rank: int | None
    ) -> int:
        """Return the most bytes above what is held at the start while a device's old rank becomes its new one.

        Chunk by chunk: the new tensors of a chunk are made, then the old ones are freed. Either rank may be None.

        Args:
            layouts: old and new.
        """
        spec, key = self.specs[model_stage], (model_stage, self.workload, self.precision)
        return _in_place_peak(spec, key, layouts, old_rank, new_rank)


@lru_cache(maxsize=4096)
def _held(
    model_stage: str, spec: ModelSpec, layout: Layout, workload: Workload, precision: Precision
) -> tuple[int, ...]:
    stage = StagePlan(1, layout, (), 1)
    ranks = (estimate_rank(model_stage, stage, spec, rank, workload, precision) for rank in range(layout.size))
    return tuple(sum(rank.resident.values()) for rank in ranks)


@lru_cache(maxsize=65536)
def _in_place_peak(
    spec: ModelSpec,
    key: tuple[str, Workload, Precision],
    layouts: tuple[Layout, Layout],
    old_rank: int | None,
    new_rank: int | None,
) -> int:
    """Sum over chunks; what isn't in any (fragmentation of the heap) comes with the first and goes with the last."""
    order = chunk_order(spec, *layouts)

    def by_chunk(layout: Layout, rank: int | None, rest_at: int) -> np.ndarray:
        if rank is None:
            return np.zeros(len(order), dtype=np.int64)
        chunks = chunk_elements(spec, layout)
        elements = np.array([chunks[chunk][rank] for chunk in order])
        held = _held(key[0], spec, layout, key[1], key[2])[rank]
        result = elements * (held // max(1, int(elements.sum())))
        result[rest_at] += held - int(result.sum())
        return result

    made, freed = by_chunk(layouts[1], new_rank, 0), by_chunk(layouts[0], old_rank, -1)
    above = np.cumsum(made) - np.concatenate([[0], np.cumsum(freed)[:-1]])
    return max(0, int(above.max()))


def resident_bytes(plan: Plan, memory: TransitionMemory, devices: Iterable[int]) -> dict[int, int]:
    """Return by device the bytes that the units of a plan hold."""
    total = dict.fromkeys(devices, 0)
    for name, stage in plan.items():
        for device, count in zip(stage.devices, itertools.cycle(memory.held(name, stage.layout))):
            total[device] += count
    return total


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, such as `1.50 GiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"
