"""Parts of the devices that go their own ways, and which are alike: what is planned for one holds for its twins."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from nereus.emu import Emu
from nereus.transition.assign import NodeOf
from nereus.transition.local import GENERATION, TRAINING, Sides

# Rounds in which devices that units join find each other; each at least doubles how far they see. What takes longer
# doesn't fall into many small parts.
_ROUNDS = 6


@dataclass(frozen=True)
class Part:
    """Devices whose units lie on no others, and these units, of both plans; twins have both in the same order."""

    devices: tuple[int, ...]
    units: tuple[Emu, ...]


# Parts that are alike: the same units of the same model-stages on the same places, as much free memory at each place,
# and the same places on common nodes.
Twins = tuple[Part, ...]


def find_twins(
    sides: Sequence[Sides], free_bytes: Mapping[int, int], node_of: NodeOf, lost: Collection[int] = frozenset()
) -> tuple[Twins, ...]:
    """Return all parts, twins together; nothing where most parts have no twin.

    A part with new units of a model-stage and no live one to copy from is put together with one that has some.

    Args:
        free_bytes: by device, at the start; of all that aren't lost.
        lost: devices whose memory is gone; those with free memory are there again, empty.
    """
    groups = [group for side in sides for group in (side.before, side.after)]
    named = [np.array([unit.devices for unit in group]) for group in groups]
    ids = np.unique(np.concatenate([devices.ravel() for devices in named]))
    is_lost = np.isin(ids, list(lost))
    slots = [np.searchsorted(ids, devices) for devices in named]
    part = _joined(slots, len(ids))
    if part is None:
        return ()
    live = [slot[~is_lost[slot].any(axis=1)] for slot in slots[::2]]
    part = _fed(part, [side.model_stage for side in sides], live, slots[1::2])
    if 2 * np.bincount(part).max() > len(ids):
        return ()
    flat = np.concatenate([slot.ravel() for slot in slots])
    ordered, place = _places(flat, part)
    devices, label = ids[ordered].tolist(), part[ordered]
    first_of_node = _firsts(label, np.array(list(map(node_of, devices))))
    free = [free_bytes.get(device, -1) for device in devices]
    there = _pieces(np.stack([free, is_lost[ordered], place[ordered[first_of_node]]], axis=1), label)
    by_part = np.argsort(part[flat], kind="stable")
    group_of = np.repeat(np.arange(len(slots)), [slot.size for slot in slots])
    lies = _pieces((group_of * len(ids) + place[flat])[by_part], part[flat][by_part])
    units: dict[int, list[Emu]] = {number: [] for number in np.unique(part).tolist()}
    for group, slot in zip(groups, slots, strict=True):
        for unit, number in zip(group, part[slot[:, 0]].tolist(), strict=True):
            units[number].append(unit)
    found: dict[tuple[bytes, bytes], list[Part]] = {}
    cuts = itertools.pairwise(_bounds(label))
    for (start, end), *likeness, own in zip(cuts, there, lies, units.values(), strict=True):
        found.setdefault((likeness[0], likeness[1]), []).append(Part(tuple(devices[start:end]), tuple(own)))
    return tuple(map(tuple, found.values())) if 2 * len(found) <= len(units) else ()


def _joined(slots: Sequence[np.ndarray], num_devices: int) -> np.ndarray | None:
    """Return by device the lowest one of its part, int64 [num_devices]; None where parts are too large to tell.

    Args:
        slots: of each group of disjoint units the devices, [units, ranks].
    """
    lowest = np.arange(num_devices)
    for _ in range(_ROUNDS):
        before = lowest.copy()
        for slot in slots:
            lowest[slot] = lowest[slot].min(axis=1, keepdims=True)
        lowest = lowest[lowest]
        if (lowest == before).all():
            return lowest
    return None


def _fed(
    part: np.ndarray, names: Sequence[str], before: Sequence[np.ndarray], after: Sequence[np.ndarray]
) -> np.ndarray:
    """Return the parts with those that lack a source put together with others, evenly and in the order of devices."""
    for name, slot in zip(names, after, strict=True):
        is_source = np.zeros(len(part), dtype=bool)
        for other, old in zip(names, before, strict=True):
            if other == name or (name, other) == (GENERATION, TRAINING):
                is_source[old] = True
        givers = np.unique(part[is_source])
        takers = np.setdiff1d(part[slot], givers)
        if len(givers) and len(takers):
            fed_by = np.arange(len(part))
            fed_by[takers] = givers[np.arange(len(takers)) * len(givers) // len(takers)]
            part = fed_by[part]
    return part


def _places(flat: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the devices part by part, in the order in which units name them first, and of each its place there."""
    first = np.zeros(len(part), dtype=np.int64)
    first[flat[::-1]] = np.arange(len(flat))[::-1]
    ordered = np.lexsort((first, part))
    sizes = np.diff(_bounds(part[ordered]))
    place = np.empty_like(ordered)
    place[ordered] = np.arange(len(ordered)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ordered, place


def _firsts(labels: np.ndarray, nodes: np.ndarray) -> np.ndarray:
    """Return the index of the first device with the same label on the same node."""
    _, first, number = np.unique(labels * (1 + nodes.max()) + nodes, return_index=True, return_inverse=True)
    return first[number]


def _pieces(rows: np.ndarray, labels: np.ndarray) -> list[bytes]:
    """Return each run of rows with equal labels as bytes, to be compared."""
    raw, width = rows.tobytes(), rows.nbytes // len(rows)
    return [raw[width * start : width * end] for start, end in itertools.pairwise(_bounds(labels))]


def _bounds(labels: np.ndarray) -> list[int]:
    """Return where each run of equal labels starts, and the end."""
    return [*np.flatnonzero(np.diff(labels, prepend=-1)).tolist(), len(labels)]


def only_on(sides: Sequence[Sides], devices: Collection[int]) -> tuple[Sides, ...]:
    """Return what of both plans lies on some whole parts."""

    def there(units: tuple[Emu, ...]) -> tuple[Emu, ...]:
        return tuple(unit for unit in units if unit.devices[0] in devices)

    return tuple(replace(side, before=there(side.before), after=there(side.after)) for side in sides)
