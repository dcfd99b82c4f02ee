"""Which request sits in which cache slot, and what the next forward pass computes: continuous batching without tensors.

Every rank of a replica runs the same schedule. It depends on the order and length of the requests and on which of them
have ended, never on time, so the ranks agree without a word and two runs of the same plan compute the same passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nereus.layout import partition


@dataclass(frozen=True)
class Move:
    """The first `length` cached tokens of slot `source` go to the free slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Prefill:
    """One pass over whole prompts, packed: request `requests[i]` enters slot `slots[i]`."""

    requests: tuple[int, ...]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Decode:
    """One token for each of slots 0..num_rows-1, after `moves` have closed the gaps, in this order."""

    num_rows: int
    moves: tuple[Move, ...] = ()

    @property
    def slots(self) -> range:
        return range(self.num_rows)


class RequestQueue:
    """Requests that wait, in request order; the waves of a pipeline take from one queue."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        self.prompt_tokens = tuple(prompt_tokens)
        self._next = 0

    def __len__(self) -> int:
        return len(self.prompt_tokens) - self._next

    def take(self, most: int, max_tokens: int) -> tuple[int, ...]:
        """Remove and return up to `most` requests of `max_tokens` prompt tokens in all; the first always fits."""
        first = self._next
        total = 0
        while len(self) and self._next - first < most:
            total += self.prompt_tokens[self._next]
            if total > max_tokens and self._next > first:
                break
            self._next += 1
        return tuple(range(first, self._next))


class SlotSchedule:
    """The slots of one wave: `next_pass` says what to compute, `finish` what has ended."""

    def __init__(self, queue: RequestQueue, num_slots: int, *, max_prefill_tokens: int) -> None:
        self._queue = queue
        self._max_prefill_tokens = max_prefill_tokens
        self._requests: list[int | None] = [None] * num_slots
        self._cached = [0] * num_slots

    def request_at(self, slot: int) -> int:
        """Return the index of the request in an occupied slot."""
        request = self._requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def next_pass(self) -> Prefill | Decode | None:
        """Return the next pass, or None when no request is left; the caller runs every pass it is given.

        Free slots are filled before anything else, lowest slot first. Only when the queue is empty are gaps closed,
        by moving the highest occupied slots down.
        """
        free = [slot for slot, request in enumerate(self._requests) if request is None]
        admitted = self._queue.take(len(free), self._max_prefill_tokens)
        if admitted:
            slots = tuple(free[: len(admitted)])
            for slot, request in zip(slots, admitted, strict=True):
                self._requests[slot] = request
                self._cached[slot] = self._queue.prompt_tokens[request]
            return Prefill(admitted, slots)
        num_rows = len(self._requests) - len(free)
        if not num_rows:
            return None
        moves = self._close_gaps(num_rows)
        for slot in range(num_rows):
            self._cached[slot] += 1
        return Decode(num_rows, moves)

    def finish(self, slots: Iterable[int]) -> None:
        """Free the slots of requests that have ended."""
        for slot in slots:
            assert self._requests[slot] is not None, f"slot {slot} is free"
            self._requests[slot] = None

    def _close_gaps(self, num_rows: int) -> tuple[Move, ...]:
        gaps = [slot for slot in range(num_rows) if self._requests[slot] is None]
        beyond = [slot for slot in range(num_rows, len(self._requests)) if self._requests[slot] is not None]
        moves = []
        for source, target in zip(reversed(beyond), gaps, strict=True):
            self._requests[target], self._requests[source] = self._requests[source], None
            self._cached[target] = self._cached[source]
            moves.append(Move(source, target, self._cached[source]))
        return tuple(moves)


def wave_slots(num_requests: int, num_slots: int, num_waves: int) -> tuple[tuple[int, int], ...]:
    """Return the (start, stop) slots of each wave that gets any.

    A wave is what one pipeline stage works on while the others work on the other waves. Fewer requests than slots are
    spread over the waves, so that all stages work.
    """
    ranges = partition(min(num_requests, num_slots), num_waves)
    return tuple((start, stop) for start, stop in ranges if stop > start)
