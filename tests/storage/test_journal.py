"""The journal: one sequence, one writer for each number, and fencing."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import journal as journal_module
from storage.journal import DamagedJournal, Entry, FencedOff, Journal
from storage.small_files import list_names, read_file, remove_file, replace_file

FIRST = "journal/00000001.json"


def test_entries_are_numbered_and_read_back(store_url):
    journal = Journal(store_url)
    assert journal.entries() == []
    assert journal.newest("commit") is None
    bodies = [{"run_id": "ä\n"}, {"step": 0}, {"step": 1, "deep": {"list": [1, 2.5, None, True]}}]
    for kind, body in zip(("take_over", "commit", "commit"), bodies, strict=True):
        journal.append(kind, body)
    expected = [Entry(1, "take_over", bodies[0]), Entry(2, "commit", bodies[1]), Entry(3, "commit", bodies[2])]
    assert journal.entries() == expected
    assert Journal(store_url).entries() == expected
    assert Journal(f"{store_url}/").newest("commit") == expected[2]
    assert list_names(f"{store_url}/journal") == ["00000001.json", "00000002.json", "00000003.json"]


def test_entries_of_others_are_seen(store_url):
    writer, reader = Journal(store_url), Journal(store_url)
    writer.append("take_over", {})
    assert len(reader.entries()) == 1
    writer.append("commit", {"step": 0})
    assert reader.newest("commit") == Entry(2, "commit", {"step": 0})


def test_a_stale_writer_stops(store_url):
    old = Journal(store_url)
    old.append("take_over", {"who": "old"})
    old.append("commit", {"step": 0})
    old.check()
    new = Journal(store_url)
    new.entries()
    new.append("take_over", {"who": "new"})
    for action in (old.check, lambda: old.append("commit", {"step": 1}), old.check):
        with pytest.raises(FencedOff, match="another driver has taken over"):
            action()
    new.check()
    new.append("commit", {"step": 1})
    assert [entry.kind for entry in new.entries()] == ["take_over", "commit", "take_over", "commit"]


def test_looking_doesnt_bring_a_stale_writer_back(store_url):
    """Its view of the journal grows by reading, its right to append doesn't."""
    old = Journal(store_url)
    old.append("take_over", {"who": "old"})
    new = Journal(store_url)
    new.entries()
    new.append("take_over", {"who": "new"})
    assert len(old.entries()) == 2
    with pytest.raises(FencedOff):
        old.append("commit", {"step": 0})
    with pytest.raises(FencedOff):
        old.check()
    assert len(new.entries()) == 2


def test_one_of_eight_appenders_gets_the_number(store_url):
    first = Journal(store_url)
    first.append("take_over", {})
    journals = [Journal(store_url) for _ in range(8)]
    for journal in journals:
        journal.entries()
    ready = threading.Barrier(8)

    def append(number):
        ready.wait()
        try:
            return journals[number].append("take_over", {"who": number})
        except FencedOff:
            return None

    with ThreadPoolExecutor(8) as threads:
        winners = [entry for entry in threads.map(append, range(8)) if entry is not None]
    assert len(winners) == 1
    assert first.entries()[1:] == winners


def test_threads_of_one_writer_dont_fence_each_other(store_url):
    journal = Journal(store_url)
    with ThreadPoolExecutor(4) as threads:
        numbers = [
            entry.number for entry in threads.map(lambda step: journal.append("commit", {"step": step}), range(8))
        ]
    assert sorted(numbers) == list(range(1, 9))
    journal.check()


def test_an_append_whose_answer_was_lost_has_succeeded(store_url, monkeypatch):
    """It is not written twice when it is tried again, and doesn't stand in the way of another."""
    create = journal_module.create_exclusively
    journal = Journal(store_url)
    journal.append("take_over", {})

    def lose_answer(url, data):
        create(url, data)
        raise ConnectionResetError("reset")

    for body in ({"step": 0}, {"step": 2}):
        monkeypatch.setattr(journal_module, "create_exclusively", lose_answer)
        with pytest.raises(ConnectionResetError):
            journal.append("commit", body)
        monkeypatch.setattr(journal_module, "create_exclusively", create)
        if body["step"] == 0:
            assert journal.append("commit", body).number == 2
            journal.check()
    assert journal.append("commit", {"step": 3}).number == 4
    assert [entry.body.get("step") for entry in Journal(store_url).entries()] == [None, 0, 2, 3]


def test_a_number_that_the_listing_lacked_is_read(store_url, monkeypatch):
    """A listing isn't a snapshot: it may show an entry and lack an older one that came while it was made."""
    writer = Journal(store_url)
    for step in range(3):
        writer.append("commit", {"step": step})
    names = ["00000001.json", "00000003.json"]
    monkeypatch.setattr(journal_module, "list_names", lambda url: names)
    assert [entry.number for entry in Journal(store_url).entries()] == [1, 2, 3]


def test_a_hole_is_named(store_url):
    writer = Journal(store_url)
    for step in range(3):
        writer.append("commit", {"step": step})
    remove_file(f"{store_url}/journal/00000002.json")
    with pytest.raises(DamagedJournal, match=r"00000002\.json is missing"):
        Journal(store_url).entries()


def test_other_files_are_no_entries(store_url):
    journal = Journal(store_url)
    journal.append("take_over", {})
    for name in ("heartbeat-1", "1.json", "000000002.json", "00000002.json.bak", ".00000002.json.0.new", "driver.lock"):
        replace_file(f"{store_url}/journal/{name}", b"{}")
    assert len(Journal(store_url).entries()) == 1
    journal.append("commit", {})


def entry_text(**changes):
    entry = {"number": 1, "kind": "commit", "nonce": "a.1", "body": {"step": 0}, **changes}
    return json.dumps(entry, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"number":' + b"9" * 5000 + b"}",
        entry_text(),
        entry_text(checksum="0" * 32),
        entry_text(checksum=None),
    ],
)
def test_damaged_and_hostile_entries_are_named(tmp_path, data):
    replace_file(tmp_path / FIRST, data)
    with pytest.raises(DamagedJournal, match=r"journal/00000001\.json is damaged .*; bring it back"):
        Journal(str(tmp_path)).entries()


def test_every_altered_byte_and_every_cut_is_found(tmp_path):
    Journal(str(tmp_path)).append("take_over", {"config": {"seed": 1, "name": "x"}})
    good = read_file(tmp_path / FIRST)
    damaged = [good[:length] for length in range(len(good))] + [good + b" "]
    damaged += [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :] for i in range(len(good))]
    for data in damaged:
        (tmp_path / FIRST).write_bytes(data)
        with pytest.raises(DamagedJournal):
            Journal(str(tmp_path)).entries()


def test_an_entry_in_the_place_of_another_is_found(tmp_path):
    journal = Journal(str(tmp_path))
    journal.append("take_over", {})
    journal.append("commit", {})
    (tmp_path / "journal/00000002.json").write_bytes(read_file(tmp_path / FIRST))
    with pytest.raises(DamagedJournal, match="it holds entry 1"):
        Journal(str(tmp_path)).entries()


def test_a_damaged_entry_in_the_place_of_ours_fences_off(tmp_path):
    journal = Journal(str(tmp_path))
    journal.append("take_over", {})
    replace_file(tmp_path / "journal/00000002.json", b"")
    with pytest.raises(FencedOff):
        journal.append("commit", {})


def test_numbers_outside_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        Journal(str(tmp_path)).append("commit", {"loss": float("nan")})
    assert list_names(tmp_path) == []


def test_messages_hide_credentials():
    journal = Journal("memory://key:secret@bucket/run")
    replace_file("memory://key:secret@bucket/run/journal/00000001.json", b"{")
    with pytest.raises(DamagedJournal) as caught:
        journal.entries()
    assert "secret" not in str(caught.value)
