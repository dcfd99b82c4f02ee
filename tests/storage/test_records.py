"""JSONL records on disk and in an object store."""

import contextlib
import errno
import math
import os

import fsspec
import pytest

from storage import records
from storage.records import append_record, keep_records, read_records
from storage.small_files import file_exists, remove_file


@pytest.fixture
def url(store_url):
    return f"{store_url}/run/m.jsonl"


def test_round_trip_in_order(url):
    assert read_records(url) == []
    for step in range(12):
        append_record(url, {"step": step, "text": "ä\n"})
    assert [r["step"] for r in read_records(url)] == list(range(12))
    assert read_records(url)[3]["text"] == "ä\n"


def test_keep_removes_and_appending_goes_on(url):
    keep_records(url, lambda r: False)
    for step in range(6):
        append_record(url, {"step": step})
    keep_records(url, lambda r: r["step"] < 3)
    append_record(url, {"step": 3})
    assert [r["step"] for r in read_records(url)] == [0, 1, 2, 3]


def test_a_writer_that_is_held_up_and_taken_over_adds_nothing(url):
    """Between its check and its write the run gets another driver, which cuts back and does the step again."""
    taken_over = []

    def check():
        if taken_over:
            raise RuntimeError("fenced off")

    def check_and_be_held_up():
        check()
        taken_over.append(True)
        keep_records(url, lambda record: record["step"] < 1)
        append_record(url, {"step": 1, "by": "new"}, number=1)

    for step in range(1):
        append_record(url, {"step": step, "by": "old"}, number=step, check=check)
    with contextlib.suppress(RuntimeError):
        append_record(url, {"step": 1, "by": "old"}, number=1, check=check_and_be_held_up)
    assert [(r["step"], r["by"]) for r in read_records(url)] == [(0, "old"), (1, "new")]
    with pytest.raises(RuntimeError, match="fenced off"):
        append_record(url, {"step": 2, "by": "old"}, number=2, check=check)
    assert len(read_records(url)) == 2


def test_a_writer_that_was_taken_over_removes_nothing(url):
    for step in range(3):
        append_record(url, {"step": step}, number=step)

    def check():
        raise RuntimeError("fenced off")

    with pytest.raises(RuntimeError, match="fenced off"):
        keep_records(url, lambda record: record["step"] < 1, check=check)
    assert [r["step"] for r in read_records(url)] == [0, 1, 2]
    assert not file_exists(f"{url}.new")


def test_an_object_of_a_step_is_the_new_writers_though_the_old_one_was_faster(url):
    append_record(url, {"step": 0}, number=0)
    keep_records(url, lambda record: False)
    if "://" in url:  # on disk what an old writer adds now goes to a file that is gone
        append_record(url, {"step": 1, "by": "old"}, number=1)
    append_record(url, {"step": 0}, number=0)
    append_record(url, {"step": 1, "by": "new"}, number=1)
    assert [(r["step"], r.get("by")) for r in read_records(url)] == [(0, None), (1, "new")]


def test_a_kill_while_cutting_back_leaves_no_hole(url, monkeypatch):
    """On disk all goes at once; of objects the last go first."""
    for step in range(6):
        append_record(url, {"step": step})

    class Killed(BaseException):
        pass

    removed = []

    def die_at_third(name):
        if len(removed) == 2:
            raise Killed
        removed.append(name)
        remove_file(name)

    monkeypatch.setattr(records, "remove_file", die_at_third)
    with contextlib.suppress(Killed):
        keep_records(url, lambda r: r["step"] < 2)
    assert [r["step"] for r in read_records(url)] in ([0, 1], [0, 1, 2, 3])


def test_a_record_is_on_the_disk_when_a_commit_may_rely_on_it(tmp_path, monkeypatch):
    synced = []
    fsync = os.fsync

    def note(fd):
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    append_record(tmp_path / "run" / "m.jsonl", {"step": 0})
    assert synced == [tmp_path.name, "m.jsonl", "run"]
    append_record(tmp_path / "run" / "m.jsonl", {"step": 1})
    assert synced[3:] == ["m.jsonl"]


def test_numbers_outside_json_become_null(url):
    append_record(url, {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": -math.inf}})
    assert read_records(url) == [{"a": None, "b": [None, 1.5], "c": {"d": None}}]


@pytest.mark.parametrize("torn", [b'{"step": 1', b'{"step": 1, "x": "' + b"y" * 10_000])
def test_torn_last_line_is_ignored_and_removed(tmp_path, torn):
    path = tmp_path / "m.jsonl"
    append_record(path, {"step": 0})
    with path.open("ab") as file:
        file.write(torn)
    assert [r["step"] for r in read_records(path)] == [0]
    append_record(path, {"step": 1})
    assert [r["step"] for r in read_records(path)] == [0, 1]


def test_only_a_torn_line(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"st')
    assert read_records(path) == []
    append_record(path, {"step": 0})
    assert read_records(path) == [{"step": 0}]


def test_broken_line_inside_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 0}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_records(path)


def test_a_short_write_is_gone_on_with(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data[:5])))
    append_record(tmp_path / "m.jsonl", {"text": "longer than five bytes"})
    append_record(tmp_path / "m.jsonl", {"step": 1})
    assert read_records(tmp_path / "m.jsonl") == [{"text": "longer than five bytes"}, {"step": 1}]


def test_errors_of_the_store_are_not_tried_for_ever(monkeypatch):
    """s3fs says EINVAL both for a number that is taken and for a bucket that can't be."""
    filesystem = fsspec.filesystem("memory")

    def refuse(*args, **kwargs):
        raise OSError(errno.EINVAL, "no such bucket")

    monkeypatch.setattr(filesystem, "pipe_file", refuse)
    with pytest.raises(OSError, match="no such bucket"):
        append_record("memory://nowhere/m.jsonl", {"step": 0})
