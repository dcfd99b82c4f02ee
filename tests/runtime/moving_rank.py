"""The real worker, with units whose numbers are known by where they belong."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from nereus.layout import Layout
from nereus.model.spec import ModelSpec, tensors
from nereus.plan import stage_of
from nereus.runtime.rank import Rank
from nereus.runtime.transition_orders import UnitKey
from nereus.runtime.unit_tensors import HeldTensors
from nereus.staged_state import base_name, wanted_slices
from storage.slices import TensorSlice


class MovingRank(Rank):
    """Fills what it holds, and tells whether it is what it should be."""

    def mark(self) -> None:
        """Fill all training units with numbers that tell the tensor and the place in it, and what is cast from them."""
        for key, held in self.held.pool.items():
            if stage_of(key.model_stage) != "inference":
                for part in slices(held):
                    held.find(part).copy_(true_values(held, part))
        for unit in self.units.values():
            if unit.training is not None:
                unit.training.refresh_compute_weights()

    def count_wrong(self) -> dict[UnitKey, int]:
        """Return by unit in the pool how many elements are wrong."""
        return {key: self._wrong_of(key, held) for key, held in self.held.pool.items()}

    def _wrong_of(self, key: UnitKey, held: HeldTensors) -> int:
        if stage_of(key.model_stage) != "inference":
            return sum(int((held.find(part) != true_values(held, part)).sum()) for part in slices(held))
        fresh = self.held.describe(key.model_stage, held.layout, held.rank)
        fresh.make()
        with contextlib.closing(self.held.orders[key.model_stage].source.open()) as source:
            fresh.fill(source)
        return sum(int((fresh.find(part) != held.find(part)).sum()) for part in slices(held))

    def spoil(self, model_stage: str) -> None:
        """Overwrite what a unit in force holds."""
        if model_stage in self.units:
            for tensor in self.held.pool[self.units[model_stage].key].tensors[""].values():
                tensor.fill_(-1)

    def locate(self) -> dict[str, list[int]]:
        """Return by model-stage where its tensors lie, those of forward passes too."""
        result = {}
        for key, held in self.held.pool.items():
            every = [*held.tensors.values(), held.weights()]
            result[key.model_stage] = [tensor.data_ptr() for tensors in every for tensor in tensors.values()]
        return result

    def describe_force(self) -> dict[str, tuple[UnitKey, int, bool]]:
        """Return by model-stage in force its key, its updates, and whether it works on what the pool holds."""
        result = {}
        for name, unit in self.units.items():
            held = self.held.pool[unit.key]
            weights, parameters = held.weights(), dict(unit.shard.named_parameters())
            is_over = all(weights[n].data_ptr() == p.data_ptr() for n, p in parameters.items())
            is_over = is_over and weights.keys() == parameters.keys()
            for n, parameter in parameters.items():
                is_over = is_over and torch.equal(parameter.detach(), held.tensors[""][n].to(parameter.dtype))
            if unit.training is not None:
                moments = unit.training.optimizer.exp_avg
                is_over = is_over and all(moments[n] is t for n, t in held.tensors["exp_avg/"].items())
            result[name] = (unit.key, unit.counters.updates, is_over)
        return result


def slices(held: HeldTensors) -> list[TensorSlice]:
    """Return all that a rank holds, by names in staged state."""
    found = _wanted(held.spec, held.layout, held.rank)
    return [part for part in found if part.name.removesuffix(base_name(part.name)) in held.tensors]


@lru_cache(maxsize=1024)
def _wanted(spec: ModelSpec, layout: Layout, rank: int) -> tuple[TensorSlice, ...]:
    return tuple(wanted_slices(spec, layout, rank))


def true_values(held: HeldTensors, part: TensorSlice) -> Tensor:
    """Return whole numbers below 251, exact in any dtype, that differ by tensor and place."""
    return _true_values(held.spec, part)


@lru_cache(maxsize=1 << 16)
def _true_values(spec: ModelSpec, part: TensorSlice) -> Tensor:
    name = base_name(part.name)
    shape = tensors(spec)[name].shape
    whole = torch.arange(math.prod(shape)).view(shape)[replace(part, name=name).within(_whole(name, shape))]
    return (7 * whole + sum(part.name.encode())) % 251


def _whole(name: str, shape: tuple[int, ...]) -> TensorSlice:
    return TensorSlice(name, (0,) * len(shape), shape)
