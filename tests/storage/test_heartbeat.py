"""Signs of life: they change, end in good order, and wait for no store that hangs."""

import threading
import time

import pytest

from storage import heartbeat
from storage.heartbeat import Heartbeat, watch
from storage.small_files import file_exists, read_file, replace_file

LONG_S = 60.0


@pytest.fixture
def url(store_url):
    return f"{store_url}/journal/heartbeat-{'0' * 32}"


def test_a_living_writer_is_seen_and_an_ended_one_too(url):
    assert not watch(url, LONG_S)  # none there
    writer = Heartbeat(url, 0.05)
    writer.beat()
    writer.start()
    assert watch(url, LONG_S)
    writer.stop()
    writer.stop()
    assert not file_exists(url)
    assert not watch(url, LONG_S)


def test_a_silent_writer_is_waited_for(url):
    replace_file(url, b"{}")
    told = []
    begin = time.monotonic()
    assert not watch(url, 0.2, lambda: told.append(1))
    assert time.monotonic() - begin >= 0.2
    assert told == [1]


def test_two_writers_signs_differ(url):
    signs = []
    for _ in range(2):
        Heartbeat(url, LONG_S).beat()
        signs.append(read_file(url))
    assert signs[0] != signs[1]


def test_the_end_waits_for_no_store_that_hangs(tmp_path, monkeypatch, caplog):
    url = str(tmp_path / "heartbeat")
    hangs, go_on = threading.Event(), threading.Event()

    def hang(*args, **options):
        hangs.set()
        go_on.wait(LONG_S)

    writer = Heartbeat(url, 0.01)
    writer.beat()
    monkeypatch.setattr(heartbeat, "replace_file", hang)
    monkeypatch.setattr(heartbeat, "_STOP_LIMIT_S", 0.05)
    monkeypatch.setattr(heartbeat, "remove_file", lambda url, patient: pytest.fail("it would hang, too"))
    writer.start()
    hangs.wait(LONG_S)
    writer.stop()
    assert "stays behind: its store doesn't answer" in caplog.text
    go_on.set()


def test_a_store_that_is_away_is_told_once(tmp_path, monkeypatch, caplog):
    failures = []

    def refuse(*args, **options):
        failures.append(1)
        raise OSError("the store is away")

    monkeypatch.setattr(heartbeat, "replace_file", refuse)
    writer = Heartbeat(str(tmp_path / "heartbeat"), 0.01)
    writer.start()
    while len(failures) < 5:
        time.sleep(0.001)
    writer.stop()
    assert caplog.text.count("the store is away") == 1
