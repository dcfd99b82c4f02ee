"""What a driver tells its workers of a transition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from nereus.emu import Emu
from nereus.layout import Layout
from nereus.plan import StagePlan
from nereus.runtime.sources import ModelSource
from nereus.runtime.training import LossSettings, OptimizerSettings
from storage.manifest import ShardRecord


class UnitKey(NamedTuple):
    """By what units are told apart; those of the old and the new plan with equal keys are one, kept."""

    model_stage: str
    layout: Layout
    devices: tuple[int, ...]

    @classmethod
    def of(cls, unit: Emu) -> UnitKey:
        return cls(unit.model_stage, unit.layout, unit.devices)


@dataclass(frozen=True)
class BuildOrder:
    """All that a worker needs to build its rank of a model-stage."""

    model_stage: str
    plan: StagePlan
    epoch: int
    source: ModelSource
    dtype: torch.dtype
    optimizer: OptimizerSettings | None = None
    loss: LossSettings | None = None
    from_source: bool = True  # false: `restore` follows, for a training model-stage


@dataclass(frozen=True)
class TransitionOrder:
    """What a device connects before anything moves.

    Attributes:
        epoch: of all communicators of this attempt.
        devices: of the old and the new plan, ascending: the ranks of the communicator that carries slices.
        builds: of the target's model-stages that change, those in which this device has a rank, in the plan's order.
        sync: actor.training and actor.generation of the target, where either changes and this device has a rank in one.
    """

    epoch: int
    devices: tuple[int, ...]
    builds: tuple[BuildOrder, ...]
    sync: tuple[StagePlan, StagePlan] | None = None


@dataclass(frozen=True)
class RestoreOrder:
    """Where a `restore` reads what its devices don't hold.

    Attributes:
        group: of the staged set; empty where `source` is read instead.
        folder: of the set, any fsspec URL.
        shards: records of its shards; none where they follow one by one.
        feed: by whose name they follow; empty where they are here.
        source: of a frozen model.
    """

    group: str = ""
    folder: str = ""
    shards: tuple[ShardRecord, ...] = ()
    feed: str = ""
    source: ModelSource | None = None
