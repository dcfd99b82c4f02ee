"""Where no order was found: which primitive came closest, and on which device how much it lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from nereus.transition.drafting import Drafting
from nereus.transition.local import closure
from nereus.transition.stage_state import StageState


@dataclass
class DeadEnd(Exception):
    """Nothing that is left fits, and nothing more may be freed.

    Attributes:
        model_stage: of the transfer that came closest.
        device: where it lacks most, -1 where no live unit holds the state at all.
        need_bytes, free_bytes: there.
        holders: model-stages with old units on devices that lack memory, or without any live unit.
    """

    model_stage: str
    device: int
    need_bytes: int
    free_bytes: int
    holders: frozenset[str]


def find_dead_end(
    blocked: Collection[tuple[StageState, int]],
    stages: Mapping[str, StageState],
    free: Mapping[int, int],
    drafting: Drafting,
) -> DeadEnd:
    """Return the closest miss of all transfers that are blocked.

    Args:
        blocked: model-stages with numbers of their transfers.
        free: bytes by device.
    """

    def room(device: int) -> int:
        """Return the bytes that are free on a device once all that may go has gone."""
        going = (stage for stage in stages.values() if stage.is_staged or stage.is_derived)
        return free[device] + sum(stage.bytes_at(device) for stage in going if stage.number_at(device) is not None)

    misses: list[tuple[int, str, int, int]] = []
    holders: set[str] = set()
    for stage, index in blocked:
        found = drafting.beside(stage, index)
        if found is None:
            return DeadEnd(stage.name, -1, 0, 0, frozenset({stage.name}))
        drafts = [found[0]]
        if not stage.is_staged and not stage.alive.isdisjoint(stage.change.transfers[index].overlaps):
            group = closure(index, stage.change, stage.users, stage.pending, stage.alive)
            drafts.append(drafting.in_place(stage, *group))
        for draft in drafts:
            lack, device, need = max((peak - room(d), d, peak) for d, (peak, _) in draft.memory.items())
            misses.append((lack, stage.name, device, need))
        for device, (peak, _) in drafts[0].memory.items():
            if peak > free[device]:
                holders.update(name for name, other in stages.items() if other.number_at(device) is not None)
    _, name, device, need = min(misses)
    return DeadEnd(name, device, need, room(device), frozenset(holders))
