"""A worker that takes a random time for everything that a transition asks of it, and little for all else."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from nereus.model.spec import ModelSpec
from nereus.model.weights import WeightSource
from nereus.plan import StagePlan
from nereus.runtime.sources import ModelSource
from nereus.runtime.transition_orders import BuildOrder, RestoreOrder, UnitKey
from nereus.runtime.unit_tensors import HeldTensors
from nereus.runtime.worker import WorkerContext
from nereus.staged_state import ShardOrder
from nereus.transition.chunks import Chunk
from nereus.transition.primitives import Primitive
from storage.manifest import ShardRecord
from storage.slices import TensorSlice
from tests.runtime.moving_rank import MovingRank, slices

# Most seconds of one pause; most of all that a primitive or a shard makes.
_PAUSE_S = 0.004


class RememberedSource(ModelSource):
    """Random weights, each slice of which a process draws once."""

    def open(self) -> WeightSource:
        return _Remembered(super().open())


class _Remembered:
    def __init__(self, source: WeightSource) -> None:
        self._source, self._spec = source, source.spec

    def read(self, part: TensorSlice, out: Tensor) -> None:
        key = (self._spec, part, out.dtype)
        if key not in _drawn:
            self._source.read(part, out)
            _drawn[key] = out.clone()
        out.copy_(_drawn[key])

    def close(self) -> None:
        self._source.close()


_drawn: dict[tuple[ModelSpec, TensorSlice, torch.dtype], Tensor] = {}


class PacedRank(MovingRank):
    """Pauses before primitives, before each chunk of new tensors, and before shards."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._rng = random.Random(context.device)
        make = HeldTensors.make

        def make_late(held: HeldTensors, chunk: Chunk | None = None) -> None:
            self._pause()
            make(held, chunk)

        HeldTensors.make = make_late  # type: ignore[method-assign]  # this process is ours

    def _pause(self) -> None:
        time.sleep(self._rng.random() ** 3 * _PAUSE_S)

    def begin_trial(
        self,
        seed: int,
        builds: Sequence[BuildOrder],
        sync: tuple[int, StagePlan, StagePlan] | None,
        shards: Sequence[ShardOrder],
    ) -> None:
        """Forget all there was, and hold these ranks, filled with numbers that tell where they belong."""
        self.release()
        for order in builds:
            self.build(order)
        if sync is not None:
            self.connect_sync(*sync)
        self.mark()
        self.hold_shards(shards)
        self._rng.seed(seed)

    def run_primitive(self, primitive: Primitive, restore: RestoreOrder | None) -> int:
        self._pause()
        return super().run_primitive(primitive, restore)

    def write_shard(self, folder: str, file: str) -> ShardRecord:
        self._pause()
        return super().write_shard(folder, file)

    def sum_up(self, keys: Sequence[UnitKey]) -> dict[UnitKey, dict[str, int]]:
        """Return quicker sums than the real ones, over bits; they add up over ranks in the same way."""
        result: dict[UnitKey, dict[str, int]] = {}
        for key in keys:
            sums = result[key] = defaultdict[str, int](int)
            for part in slices(self.held.pool[key]):
                sums[part.name] += int(self.held.pool[key].find(part).view(torch.int32).sum())
        return {key: dict(sums) for key, sums in result.items()}

    def end_trial(self) -> tuple[dict[UnitKey, int], dict[str, tuple[UnitKey, int, bool]]]:
        """Return what `count_wrong` and `describe_force` do."""
        return self.count_wrong(), self.describe_force()
