"""The slot schedule alone, driven by random ends: a model of what the cache would hold checks every pass."""

from __future__ import annotations

import random

import pytest

from nereus.runtime.slots import Decode, Move, Prefill, RequestQueue, SlotSchedule, wave_slots


class ModelCache:
    """What a cache would hold: per slot the request and the number of its tokens."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[int, int]] = {}

    def run(self, work: Prefill | Decode, prompt_tokens: list[int]) -> list[int]:
        """Apply a pass; return the slots that got a token."""
        if isinstance(work, Prefill):
            for request, slot in zip(work.requests, work.slots, strict=True):
                assert slot not in self.slots
                self.slots[slot] = (request, prompt_tokens[request])
            return list(work.slots)
        for move in work.moves:
            assert move.target not in self.slots
            request, length = self.slots.pop(move.source)
            assert length == move.length
            self.slots[move.target] = (request, length)
        assert sorted(self.slots) == list(range(work.num_rows)), "occupied slots are not 0..n-1"
        for slot, (request, length) in self.slots.items():
            self.slots[slot] = (request, length + 1)
        return list(range(work.num_rows))


@pytest.mark.parametrize("seed", range(20))
def test_every_request_gets_exactly_its_tokens_in_admission_order(seed: int) -> None:
    rng = random.Random(seed)
    num_requests, num_slots = rng.randint(1, 30), rng.randint(1, 8)
    prompts = [rng.randint(1, 9) for _ in range(num_requests)]
    responses = [rng.randint(1, 12) for _ in range(num_requests)]
    max_prefill = rng.choice([1, 10, 1000])
    queue = RequestQueue(prompts)
    waves = [
        SlotSchedule(queue, stop - start, max_prefill_tokens=max_prefill)
        for start, stop in wave_slots(num_requests, num_slots, rng.randint(1, 3))
    ]
    caches = [ModelCache() for _ in waves]
    made = [0] * num_requests
    admitted: list[int] = []
    rows = 0
    active = list(range(len(waves)))
    while active:
        for index in list(active):
            wave, cache = waves[index], caches[index]
            work = wave.next_pass()
            if work is None:
                active.remove(index)
                continue
            if isinstance(work, Prefill):
                admitted += work.requests
                assert len(work.requests) == 1 or sum(prompts[r] for r in work.requests) <= max_prefill
            else:
                rows += work.num_rows
            ended = []
            for slot in cache.run(work, prompts):
                request = cache.slots[slot][0]
                assert wave.request_at(slot) == request
                made[request] += 1
                if made[request] == responses[request]:
                    ended.append(slot)
                    del cache.slots[slot]
            wave.finish(ended)
    assert made == responses
    assert admitted == list(range(num_requests))
    assert rows == sum(responses) - num_requests, "a finished request was decoded"


def test_a_free_slot_is_refilled_before_the_next_decode() -> None:
    schedule = SlotSchedule(RequestQueue([3, 3, 3, 3]), 2, max_prefill_tokens=100)
    assert schedule.next_pass() == Prefill((0, 1), (0, 1))
    schedule.finish([0])
    assert schedule.next_pass() == Prefill((2,), (0,))
    assert schedule.next_pass() == Decode(2)


def test_gaps_are_closed_from_the_top_when_the_queue_is_empty() -> None:
    schedule = SlotSchedule(RequestQueue([5, 6, 7, 8]), 4, max_prefill_tokens=100)
    schedule.next_pass()
    assert schedule.next_pass() == Decode(4)
    schedule.finish([0, 2])
    assert schedule.next_pass() == Decode(2, (Move(3, 0, 9),))
    assert [schedule.request_at(slot) for slot in (0, 1)] == [3, 1]


def test_prefill_is_bounded_but_never_stuck() -> None:
    schedule = SlotSchedule(RequestQueue([50, 4, 4, 4]), 4, max_prefill_tokens=8)
    assert schedule.next_pass() == Prefill((0,), (0,))
    assert schedule.next_pass() == Prefill((1, 2), (1, 2))
    assert schedule.next_pass() == Prefill((3,), (3,))
    assert schedule.next_pass() == Decode(4)


def test_no_requests_no_passes() -> None:
    assert SlotSchedule(RequestQueue([]), 2, max_prefill_tokens=8).next_pass() is None


def test_waves_share_the_slots_and_none_is_empty() -> None:
    assert wave_slots(100, 5, 2) == ((0, 3), (3, 5))
    assert wave_slots(2, 8, 3) == ((0, 1), (1, 2))
    assert wave_slots(0, 8, 3) == ()
    assert wave_slots(9, 8, 1) == ((0, 8),)
