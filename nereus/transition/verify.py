"""Logical checksums of units: what every rank counted, put together, with all who hold the same in agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus.emu import Emu
from nereus.layout import stages_of
from nereus.model.spec import ModelSpec, tensors
from nereus.staged_state import PREFIXES

_MODULUS = 2**64
# By unit (model-stage, layout, devices): the sums over the pieces that one rank holds, by tensor in staged state.
Counted = Mapping[tuple, Mapping[str, int]]


class StateDiffers(ValueError):
    """Two holders of one tensor disagree, or it isn't what it was."""


def combine(
    results: Mapping[int, Counted], units: Sequence[Emu], specs: Mapping[str, ModelSpec]
) -> dict[str, dict[str, int]]:
    """Return the logical checksum (mod 2^64) of each tensor by model-stage, the same on every layout.

    Args:
        results: what each device counted.
        units: all whose sums are wanted.

    Raises:
        StateDiffers: ranks that hold the same tensor, of one unit or of several replicas, don't agree.
    """
    found: dict[str, dict[str, int]] = {}
    for unit in units:
        sums = found.setdefault(unit.model_stage, {})
        for name, number in _whole(results, unit, specs[unit.model_stage]).items():
            if sums.setdefault(name, number) != number:
                raise StateDiffers(f"{unit.id}: {name} on devices {unit.devices} is not that of the other replicas.")
    return found


def _whole(results: Mapping[int, Counted], unit: Emu, spec: ModelSpec) -> dict[str, int]:
    """Return the sums of one unit: over the tp ranks of a pipeline stage, equal on all stages that hold a tensor."""
    key, layout = (unit.model_stage, unit.layout, unit.devices), unit.layout
    by_rank = [results[device][key] for device in unit.devices]
    sums: dict[str, int] = {}
    for info in tensors(spec).values():
        for stage in stages_of(spec, layout, info):
            ranks = by_rank[stage * layout.tp : (stage + 1) * layout.tp]
            for prefix in PREFIXES:
                name = prefix + info.name
                if not any(name in rank for rank in ranks):
                    continue
                numbers = [rank.get(name, 0) for rank in ranks]
                if info.split is None and len(set(numbers)) > 1:
                    raise StateDiffers(f"{unit.id}: {name} is not the same on devices {unit.devices}.")
                number = numbers[0] if info.split is None else sum(numbers) % _MODULUS
                if sums.setdefault(name, number) != number:
                    raise StateDiffers(f"{unit.id}: {name} is not the same on all stages that hold it.")
    return sums
