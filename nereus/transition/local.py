"""What one model-stage has to do: which units stay, and which new ones are made together, in the local order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from nereus.emu import Emu, emus_of
from nereus.layout import Layout
from nereus.plan import MODEL_STAGES, STAGES, Plan, stage_of
from nereus.transition.primitives import KINDS, Kind

GENERATION, TRAINING = "actor.generation", "actor.training"


@dataclass(frozen=True)
class Transfer:
    """New units that are made by one primitive, and the old units (numbers) some of whose devices they use."""

    kind: Kind
    makes: tuple[Emu, ...]
    overlaps: tuple[int, ...]


@dataclass(frozen=True)
class Sides:
    """The units of one model-stage in the current plan and in the target, or some of them."""

    model_stage: str
    before: tuple[Emu, ...]
    after: tuple[Emu, ...]
    old_layout: Layout
    new_layout: Layout


@dataclass(frozen=True)
class StageChange:
    """The change of one model-stage.

    Attributes:
        old: whole live units that the target doesn't have.
        dead: old units that lost a device; what is left of them is only freed.
        kept: units that both plans have.
        transfers: in the local order.
    """

    model_stage: str
    old: tuple[Emu, ...]
    dead: tuple[Emu, ...]
    kept: tuple[Emu, ...]
    transfers: tuple[Transfer, ...]
    old_layout: Layout
    new_layout: Layout


def by_stage(plan: Plan) -> list[str]:
    """Return the model-stages in the order in which ties are broken: generation, inference, training."""
    return sorted(plan, key=lambda name: (STAGES.index(stage_of(name)), MODEL_STAGES.index(name)))


def sides_of(current: Plan, target: Plan) -> tuple[Sides, ...]:
    """Return the units of both plans by model-stage, in tie order."""
    return tuple(
        Sides(
            name,
            emus_of(Plan(((name, current[name]),))),
            emus_of(Plan(((name, target[name]),))),
            current[name].layout,
            target[name].layout,
        )
        for name in by_stage(target)
    )


def stage_changes(sides: Iterable[Sides], lost: Collection[int] = frozenset()) -> tuple[StageChange, ...]:
    """Return the change of every model-stage.

    Args:
        lost: devices whose memory is gone.
    """
    return tuple(_change(side, lost) for side in sides)


def _change(side: Sides, lost: Collection[int]) -> StageChange:
    before, after = side.before, side.after
    stays: set[tuple[int, ...]] = set()
    if side.old_layout == side.new_layout:
        stays = {unit.devices for unit in before}.intersection(unit.devices for unit in after)
    dead: tuple[Emu, ...] = ()
    if lost:
        dead = tuple(unit for unit in before if not set(lost).isdisjoint(unit.devices))
        stays.difference_update(unit.devices for unit in dead)
    old = tuple(unit for unit in before if unit.devices not in stays and unit not in dead)
    new = [unit for unit in after if unit.devices not in stays]
    return StageChange(
        side.model_stage,
        old,
        dead,
        tuple(unit for unit in after if unit.devices in stays),
        tuple(_transfers(old, new, side.old_layout, side.new_layout)),
        side.old_layout,
        side.new_layout,
    )


def _transfers(old: tuple[Emu, ...], new: list[Emu], before: Layout, after: Layout) -> list[Transfer]:
    unit_of = {device: number for number, unit in enumerate(old) for device in unit.devices}
    transfers: list[Transfer] = []
    parts: dict[int, list[Emu]] = {}
    for unit in new:
        numbers = [unit_of.get(device, -1) for device in unit.devices]
        overlaps = tuple(sorted(set(numbers).difference((-1,))))
        is_inside = -1 not in numbers
        if len(overlaps) == 1 and is_inside:
            parts.setdefault(overlaps[0], []).append(unit)  # all that is cut out of one unit is made at once
        else:
            transfers.append(Transfer(_kind(bool(overlaps), is_inside, before, after), (unit,), overlaps))
    for number, units in parts.items():
        transfers.append(Transfer(_kind(True, True, before, after), tuple(units), (number,)))
    return sorted(transfers, key=lambda transfer: (KINDS.index(transfer.kind), transfer.makes[0].replica))


def _kind(overlaps: bool, is_inside: bool, before: Layout, after: Layout) -> Kind:
    """Return the name of making units on devices of which some, all or none hold old units of the model-stage."""
    if not overlaps:
        return "extend"
    if before == after:
        return "move"
    if is_inside and before.tp % after.tp == 0 and before.pp % after.pp == 0:
        return "split"
    if is_inside and after.tp % before.tp == 0 and after.pp % before.pp == 0:
        return "merge"
    return "reshard"


def closure(
    first: int, change: StageChange, users: Mapping[int, Collection[int]], pending: Collection[int], alive: set[int]
) -> tuple[list[int], list[int]]:
    """Return what must be converted together where a transfer works in place: numbers of transfers and of old units.

    That is all that is connected with it through old units that are alive and transfers that are pending.

    Args:
        first: number of the transfer.
        users: by old unit the transfers that use some of its devices.
    """
    found, numbers, todo = {first}, set[int](), [first]
    while todo:
        for number in change.transfers[todo.pop()].overlaps:
            if number in alive and number not in numbers:
                numbers.add(number)
                more = [other for other in users[number] if other in pending and other not in found]
                found.update(more)
                todo += more
    return sorted(found), sorted(numbers)


def users_of(change: StageChange) -> dict[int, list[int]]:
    """Return by number of an old unit the numbers of the transfers that use some of its devices."""
    users: dict[int, list[int]] = {}
    for index, transfer in enumerate(change.transfers):
        for number in transfer.overlaps:
            users.setdefault(number, []).append(index)
    return users
