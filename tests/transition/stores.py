"""Graphs executed on arrays: every device is a dictionary of slices, and storage is the whole model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nereus.emu import Emu, emus_of
from nereus.layout import Copy, slices_of
from nereus.model.spec import tensors
from nereus.plan import Plan
from nereus.transition.copies import copies_of, restoration_of
from nereus.transition.primitives import Primitive
from storage.slices import TensorSlice
from tests.transition.cases import SPECS

Key = tuple[str, object, int, int]  # model-stage, layout, rank, device


def key_of(unit: Emu, rank: int) -> Key:
    return unit.model_stage, unit.layout, rank, unit.devices[rank]


class Devices:
    """What all devices hold. A tensor's element is its index in the whole tensor, so a wrong slice shows."""

    def __init__(self, plan: Plan) -> None:
        self.units = {(unit.model_stage, unit.layout, unit.devices) for unit in emus_of(plan)}
        self.held: dict[Key, dict[TensorSlice, np.ndarray]] = {}
        self.taken_over: set[Key] = set()
        self.travelled_elements = 0
        for unit in emus_of(plan):
            for rank in range(unit.layout.size):
                parts = slices_of(SPECS[unit.model_stage], unit.layout, rank)
                self.held[key_of(unit, rank)] = {part: true_values(unit.model_stage, part) for part in parts}

    def start(self, primitive: Primitive) -> None:
        """Do what a primitive does; units that it makes can be read once it has ended."""
        for unit in primitive.reads:
            assert (unit.model_stage, unit.layout, unit.devices) in self.units, f"{primitive.id} reads {unit}"
        self._make(primitive)
        if primitive.kind == "restore":
            work = restoration_of(primitive, SPECS)
            for copy in work.copies:
                self._copy(primitive, copy)
            for device, parts in work.missing.items():
                for part in parts:
                    self._write(primitive, device, part, true_values(primitive.model_stage, part))
        elif primitive.makes:
            for copy in copies_of(primitive, SPECS):
                self._copy(primitive, copy)
        for unit in primitive.frees:
            self.units.remove((unit.model_stage, unit.layout, unit.devices))
            for key in set(keys_of(unit)) - self.taken_over:
                del self.held[key]

    def end(self, primitive: Primitive) -> None:
        self.units |= {(unit.model_stage, unit.layout, unit.devices) for unit in primitive.makes}

    def _make(self, primitive: Primitive) -> None:
        for unit in primitive.makes:
            for rank, device in enumerate(unit.devices):
                if device in primitive.shares:
                    assert key_of(unit, rank) in self.held, f"{primitive.id} takes over what isn't there"
                    self.taken_over.add(key_of(unit, rank))
                    continue
                parts = slices_of(SPECS[unit.model_stage], unit.layout, rank)
                assert key_of(unit, rank) not in self.held, f"{primitive.id} makes what is there"
                self.held[key_of(unit, rank)] = {part: np.full(part.sizes, -1) for part in parts}

    def _copy(self, primitive: Primitive, copy: Copy) -> None:
        source = next(unit for unit in primitive.reads if copy.source in unit.devices)
        held = self.held[key_of(source, source.rank_of(copy.source))]
        whole = next(part for part in held if part.intersect(copy.slice) == copy.slice)
        if copy.source != copy.target:
            self.travelled_elements += copy.slice.num_elements
        self._write(primitive, copy.target, copy.slice, held[whole][copy.slice.within(whole)])

    def _write(self, primitive: Primitive, device: int, part: TensorSlice, values: np.ndarray) -> None:
        unit = next(unit for unit in primitive.makes if device in unit.devices)
        held = self.held[key_of(unit, unit.rank_of(device))]
        whole = next(other for other in held if other.intersect(part) == part)
        assert (held[whole][part.within(whole)] == -1).all(), f"{primitive.id} fills {part} twice"
        held[whole][part.within(whole)] = values

    def check(self, plan: Plan) -> None:
        """Check that exactly a plan's units are there, and that each holds what it should."""
        wanted = {key for unit in emus_of(plan) for key in keys_of(unit)}
        assert set(self.held) == wanted
        for (name, *_), held in self.held.items():
            for part, values in held.items():
                assert (values == true_values(name, part)).all(), part


def keys_of(unit: Emu) -> Iterator[Key]:
    return (key_of(unit, rank) for rank in range(unit.layout.size))


def true_values(model_stage: str, part: TensorSlice) -> np.ndarray:
    """Return the indices of a part's elements in its tensor."""
    shape = tensors(SPECS[model_stage])[part.name].shape
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    return whole[tuple(slice(a, a + n) for a, n in zip(part.starts, part.sizes, strict=True))].copy()
