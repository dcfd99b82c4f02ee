"""Records that threads hand over in any order: what reads has all of them before it ends."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from nereus.runtime.communicator import CommunicatorAborted
from nereus.runtime.shard_feeds import FeedEnd, ShardFeeds
from nereus.runtime.transition_sets import TransitionSets
from storage.manifest import ShardRecord


def record(number: int) -> ShardRecord:
    return ShardRecord("actor.training", f"{number}.safetensors", 0, "", {}, ())


def go_on() -> None:
    pass


def test_all_records_come_whatever_overtakes_what(seed: int):
    items: list[ShardRecord | FeedEnd] = [*map(record, range(5)), FeedEnd(num_shards=5)]
    random.Random(seed).shuffle(items)
    feeds = ShardFeeds()
    for item in items:
        feeds.put("restore", item)
    assert {each.file for each in feeds.records("restore", go_on)} == {record(number).file for number in range(5)}


def test_an_end_ahead_of_the_last_record_ends_nothing():
    feeds = ShardFeeds()
    for item in (record(0), FeedEnd(num_shards=2), record(1)):
        feeds.put("restore", item)
    assert [each.file for each in feeds.records("restore", go_on)] == ["0.safetensors", "1.safetensors"]


def test_a_set_without_shards_ends_at_once():
    feeds = ShardFeeds()
    feeds.put("restore", FeedEnd())
    assert list(feeds.records("restore", go_on)) == []


def test_a_set_that_failed_ends_the_reader():
    feeds = ShardFeeds()
    feeds.put("restore", FeedEnd(failure="the disk is full"))
    with pytest.raises(CommunicatorAborted, match="the disk is full"):
        list(feeds.records("restore", go_on))


def test_what_comes_for_an_earlier_attempt_is_not_read():
    feeds = ShardFeeds()
    feeds.put("restore of attempt 1", FeedEnd(failure="it was broken off"))
    feeds.put("restore of attempt 2", record(0))
    feeds.put("restore of attempt 2", FeedEnd(num_shards=1))
    assert len(list(feeds.records("restore of attempt 2", go_on))) == 1
    feeds.clear()
    feeds.put("restore of attempt 2", FeedEnd())
    assert list(feeds.records("restore of attempt 2", go_on)) == []


def test_a_primitive_has_a_feed_of_its_own_in_every_attempt():
    reader = SimpleNamespace(id="actor.training/restore/0")
    one, other = (
        TransitionSets(None, None, SimpleNamespace(primitives=()), {}, step=3, committed=None)  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert one._feed_of(reader) == one._feed_of(reader) != other._feed_of(reader)  # type: ignore[arg-type]


def test_a_wait_is_broken_off_by_its_check():
    def give_up() -> None:
        raise CommunicatorAborted("the command was aborted")

    with pytest.raises(CommunicatorAborted):
        next(ShardFeeds().records("restore", give_up))
