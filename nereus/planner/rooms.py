"""How much room a model-stage finds on the devices of its block beside others: bounds on arrays of blocks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nereus.planner.pairs import Pairs
from nereus.planner.space import Ints
from nereus.planner.tables import StageTable


@dataclass(frozen=True)
class Blocks:
    """Blocks of neighbouring devices from `start` to `end`; all numbers are arrays that broadcast, or scalars.

    `size` is the number of devices of a replica, `resident` what its rank 0 holds always, `low` what any rank does.
    """

    start: Ints
    end: Ints
    size: Ints
    resident: Ints
    low: Ints

    @classmethod
    def of(cls, table: StageTable, rows: Ints, start: Ints) -> Blocks:
        """Return the blocks of some rows of a table; of an absent model-stage they are empty."""
        size = np.maximum(1, table.rows.size[rows])
        return cls(start, start + table.rows.devices[rows], size, table.resident[rows], table.resident_low[rows])


@dataclass(frozen=True)
class Region:
    """Devices from `start` to `end` on which something holds at least `held` bytes; arrays that broadcast."""

    start: Ints
    end: Ints
    held: Ints

    def meet(self, other: Region) -> Region:
        return Region(np.maximum(self.start, other.start), np.minimum(self.end, other.end), self.held + other.held)


def regions_of(first: Blocks, second: Blocks, side: NDArray[np.bool_], kept: int = 0) -> list[Region]:
    """Return where two model-stages of a stage hold how much: the first one's block, with the second one where they
    share it, and the second one's block where it lies aside.

    Args:
        kept: bytes that both hold only once.
    """
    shared = np.where(side, 0, second.low)
    end = np.where(side | (second.end == 0), first.end, np.minimum(first.end, second.end))
    return [
        Region(first.start, end, first.low + shared + kept),
        Region(np.where(side, second.start, 0), np.where(side, second.end, 0), second.low + kept),
    ]


def region_of(blocks: Blocks) -> Region:
    return Region(blocks.start, blocks.end, blocks.low)


def most_held(own: Blocks, ones: Sequence[Region], others: Sequence[Region]) -> Ints:
    """Return the most bytes that others hold on a device on which some replica of `own` begins.

    Args:
        ones, others: regions of model-stages of two other stages; those of one stage don't meet.
    """
    both = [one.meet(other) for one, other in itertools.product(ones, others)]
    held = np.zeros(1, dtype=np.int64)
    for region in (*ones, *others, *both):
        ahead = np.maximum(region.start - own.start, 0)
        begins = own.start + -(-ahead // own.size) * own.size
        held = np.maximum(held, np.where(begins < np.minimum(region.end, own.end), region.held, 0))
    return held


def most_held_with_rank_0(own: Blocks, blocks: Sequence[Blocks], regions: Sequence[Region]) -> Ints:
    """Return the most bytes that one of some blocks with its rank 0, and a region of another stage, hold on a device
    on which some replica of `own` begins as well."""
    held = np.zeros(1, dtype=np.int64)
    for block, region in itertools.product(blocks, regions):
        ahead = np.maximum(region.start - block.start, 0)
        begins = block.start + -(-ahead // block.size) * block.size
        inside = (begins < np.minimum(region.end, block.end)) & (begins < own.end) & (begins >= own.start)
        together = inside & ((begins - own.start) % own.size == 0)
        held = np.maximum(held, np.where(together, block.resident + region.held, 0))
    return held


@dataclass(frozen=True)
class Rooms:
    """Bytes of room [pairs] that the phases of each model-stage find at most, for one training pair and generation."""

    generation: Ints
    actor: Ints
    critic: Ints
    first: Ints
    second: Ints


def find_rooms(
    training: Pairs, generation: Blocks, pairs: Pairs, *, front_bytes: int, any_bytes: int, kept: int
) -> Rooms:
    """Return the rooms beside each inference pair.

    Args:
        training: one training pair.
        front_bytes, any_bytes: what may be used of the first device, and at most of any.
        kept: staging buffers of a device that trains, in bytes.
    """
    zero = np.zeros(1, dtype=np.int64)
    actor = Blocks.of(training.first_table, training.first, zero)
    critic = Blocks.of(training.second_table, training.second, training.second_start)
    first = Blocks.of(pairs.first_table, pairs.first, zero)
    second = Blocks.of(pairs.second_table, pairs.second, pairs.second_start)
    trained = regions_of(actor, critic, training.side, kept)
    inferred = regions_of(first, second, pairs.side)
    generated = [region_of(generation)]
    front = front_bytes - kept - training.resident - generation.resident - pairs.resident

    def room(own: Blocks, ones: Sequence[Region], others: Sequence[Region], less: int = 0) -> Ints:
        return any_bytes - less - own.resident - most_held(own, ones, others)

    aside = room(critic, inferred, generated, kept)
    second_aside = room(second, trained, generated)
    with_rank_0 = np.maximum(
        most_held_with_rank_0(generation, (actor, critic), inferred),
        most_held_with_rank_0(generation, (first, second), trained),
    )
    beside = np.minimum(room(generation, trained, inferred), any_bytes - generation.resident - with_rank_0)
    return Rooms(
        generation=np.minimum(front, beside),
        actor=np.minimum(front, room(actor, inferred, generated, kept)),
        critic=np.where(training.side, aside, np.minimum(front, aside)),
        first=np.minimum(front, room(first, trained, generated)),
        second=np.where(pairs.side, second_aside, np.minimum(front, second_aside)),
    )
