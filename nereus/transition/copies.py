"""Which slices travel in a primitive: from device to device, or from storage to a device. Driver and workers agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nereus.emu import Emu
from nereus.layout import Copy, holdings, plan_copies, slices_of
from nereus.model.spec import ModelSpec
from nereus.transition.primitives import Primitive
from storage.slices import TensorSlice


@dataclass(frozen=True)
class Restoration:
    """What fills the units of a `restore`: copies inside devices, and what each device reads of the set or source."""

    copies: tuple[Copy, ...]
    missing: Mapping[int, tuple[TensorSlice, ...]]


def copies_of(primitive: Primitive, specs: Mapping[str, ModelSpec]) -> tuple[Copy, ...]:
    """Return the copies of a primitive that moves slices directly, in model order for each target device.

    Those inside a device have equal source and target; devices in `shares` have none, their tensors stay as they are.
    Every device computes the same list.
    """
    assert primitive.transport != "staged" and primitive.kind not in ("stage", "destroy"), primitive.id
    spec, sources, targets = specs[primitive.model_stage], primitive.reads, primitive.makes
    assert len({unit.layout for unit in sources}) == len({unit.layout for unit in targets}) == 1, primitive.id
    copies = plan_copies(
        spec,
        sources[0].layout,
        [unit.devices for unit in sources],
        targets[0].layout,
        [unit.devices for unit in targets],
    )
    return tuple(copy for copy in copies if copy.target not in primitive.shares and copy.slice.num_elements)


def restoration_of(primitive: Primitive, specs: Mapping[str, ModelSpec]) -> Restoration:
    """Return what fills the units of a `restore`.

    A piece that the same device holds in one of `reads` is copied there; the others are read, cut where the layout of
    `reads` cuts.
    """
    assert primitive.kind == "restore", primitive.id
    spec = specs[primitive.model_stage]
    copies: list[Copy] = []
    missing: dict[int, tuple[TensorSlice, ...]] = {}
    old = {device: unit for unit in primitive.reads for device in unit.devices}
    for unit in primitive.makes:
        for rank, device in enumerate(unit.devices):
            if device in primitive.shares:
                continue
            wanted = [part for part in slices_of(spec, unit.layout, rank) if part.num_elements]
            here, away = _divide(spec, wanted, old[device], device) if device in old else ([], wanted)
            copies += [Copy(device, device, part) for part in here]
            if away:
                missing[device] = tuple(away)
    return Restoration(tuple(copies), missing)


def _divide(
    spec: ModelSpec, wanted: list[TensorSlice], old: Emu, device: int
) -> tuple[list[TensorSlice], list[TensorSlice]]:
    """Return what of `wanted` a device holds in an old unit, and what it doesn't."""
    rank = old.rank_of(device)
    pieces: dict[str, list[tuple[TensorSlice, bool]]] = {}
    for holding in holdings(spec, old.layout):
        pieces.setdefault(holding.slice.name, []).append((holding.slice, rank in holding.holders))
    here: list[TensorSlice] = []
    away: list[TensorSlice] = []
    for whole in wanted:
        for piece, is_held in pieces[whole.name]:
            part = whole.intersect(piece)
            if part is not None:
                (here if is_held else away).append(part)
    return here, away
