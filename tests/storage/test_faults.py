"""An S3 server behind a bad network: everything is tried again, nothing is done by halves, nobody waits for ever."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import host_lock, retry
from storage.errors import describe_error
from storage.exclusive import create_exclusively
from storage.journal import FencedOff, Journal
from storage.owner import DriverAlive, Owner
from storage.records import append_record, keep_records, read_records
from storage.retention import retire
from storage.shard_record import DamagedState
from storage.small_files import list_names, read_file, remove_file, replace_file
from storage.state import read_state, verify_state
from tests.services.fault_proxy import Fault, gets, puts, run_fault_proxy
from tests.storage.staged_sets import write_small_set

DATA = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def proxy(s3_server):
    with run_fault_proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def url(s3_url, proxy, monkeypatch, lock_folder):
    """A folder on the S3 server, reached through the proxy, with retries of this code alone: botocore makes none."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setitem(retry.retried.__kwdefaults__, "first_wait_s", 0.02)
    replace_file(f"{s3_url}/file", DATA)  # the connection is made, and the proxy is known to work
    proxy.clear()
    yield s3_url
    proxy.clear()


FAULTS = {
    "500": [Fault("error")],
    "500, 503, 502": [Fault("error"), Fault("error", status=503, code="SlowDown"), Fault("error", status=502)],
    "no xml": [Fault("error", status=503, code="</Error")],
    "reset": [Fault("reset")],
    "lost": [Fault("lost")],
    "lost, reset": [Fault("lost"), Fault("reset")],
    "short": [Fault("short")],
    "cut": [Fault("cut")],
    "slow": [Fault("slow", seconds=0.5)],
}


@pytest.fixture(params=FAULTS)
def strike(request, proxy):
    """A function that makes the next requests meet the faults."""
    return lambda: proxy.inject(*(dataclasses.replace(fault) for fault in FAULTS[request.param]))


def test_files(url, proxy, strike):
    strike()
    replace_file(f"{url}/new", DATA)
    assert any(kind for _, _, kind in proxy.requests)
    proxy.clear()
    strike()
    assert read_file(f"{url}/new") == DATA
    assert any(kind for _, _, kind in proxy.requests)


def test_listing_and_removing(url, proxy, strike):
    strike()
    assert list_names(url) == ["file"]
    strike()
    remove_file(f"{url}/file")
    assert list_names(url) == []


def test_the_winner_stays_the_winner(url, proxy, strike):
    strike()
    create_exclusively(f"{url}/new", DATA)
    assert read_file(f"{url}/new") == DATA
    strike()
    with pytest.raises(FileExistsError):
        create_exclusively(f"{url}/new", DATA)  # the same content is no proof of having won


def test_the_journal_and_records(url, proxy, strike):
    journal = Journal(url)
    for step in range(2):
        strike()
        journal.append("commit", {"step": step})
        append_record(f"{url}/metrics.jsonl", {"step": step})
    journal.check()
    assert [entry.body["step"] for entry in Journal(url).entries()] == [0, 1]
    assert [record["step"] for record in read_records(f"{url}/metrics.jsonl")] == [0, 1]
    keep_records(f"{url}/metrics.jsonl", lambda record: record["step"] < 1)
    assert [record["step"] for record in read_records(f"{url}/metrics.jsonl")] == [0]


def test_one_winner_of_eight_when_every_answer_may_be_lost(url, proxy):
    proxy.inject(Fault("lost", count=4), Fault("error", count=2), Fault("reset", count=2))
    ready = threading.Barrier(8)

    def create(number):
        ready.wait()
        try:
            create_exclusively(f"{url}/new", str(number).encode())
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(create, range(8)) if number is not None]
    assert len(winners) == 1
    assert read_file(f"{url}/new") == str(winners[0]).encode()


def test_an_owner_lives_through_faults_and_is_fenced_off_all_the_same(url, proxy, monkeypatch, tmp_path):
    proxy.inject(Fault("lost"), Fault("error", count=2))
    with monkeypatch.context() as another_host:
        another_host.setattr(host_lock, "_lock_path", lambda run_url: str(tmp_path / "a" / "driver.lock"))
        another_host.setattr(host_lock, "_identity", lambda fd: ["another kernel", 1, 2])
        old = Owner.take_over(url, {}, lease_s=1.0)
    with old:
        with pytest.raises(DriverAlive):
            Owner.take_over(url, {}, lease_s=60)
        old._heartbeat._end.set()
        old._heartbeat._thread.join()
        with Owner.take_over(url, {}, lease_s=0.1) as new:
            proxy.inject(Fault("lost"))
            with pytest.raises(FencedOff):
                old.journal.append("commit", {"step": 0})
            new.journal.append("commit", {"step": 0})
            assert [entry.kind for entry in new.journal.entries()] == ["take_over", "take_over", "commit"]


def test_a_set_is_retired_through_faults(url, proxy, strike):
    for name in ("manifest.json", "a.safetensors", "b.safetensors"):
        replace_file(f"{url}/step-00000000-1/{name}", b"x")
    strike()
    assert retire(url, keep=[], lease_s=30, take_over=1) == ["step-00000000-1"]
    assert list_names(url) == ["file"]


def test_an_upload_that_was_cut_is_no_object(url, proxy):
    proxy.inject(Fault("short", count=None, matches=puts("new")))
    with pytest.raises(OSError):
        create_exclusively(f"{url}/new", DATA)
    assert 4 <= len(proxy.requests) <= 8
    assert list_names(url) == ["file"]


def test_a_body_that_came_back_short_is_no_file(url, proxy):
    proxy.inject(Fault("cut", count=None, matches=gets("file")))
    with pytest.raises(OSError):
        read_file(f"{url}/file")


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "AccessDenied"])
def test_refused_credentials_end_at_once_in_one_sentence(url, proxy, monkeypatch, s3_server, code):
    actions = [
        lambda: create_exclusively(f"{url}/new", DATA),
        lambda: read_file(f"{url}/file"),
        lambda: replace_file(f"{url}/new", DATA),
        lambda: list_names(url),
        lambda: Journal(url).entries(),
    ]
    for action in actions:
        proxy.clear()
        proxy.inject(Fault("error", None, 403, code, message=f"{code} for {s3_server.key}, secret {s3_server.secret}"))
        with pytest.raises(PermissionError) as caught:
            action()
        sentence = describe_error(caught.value)
        assert code in sentence
        assert "\n" not in sentence
        assert s3_server.key not in sentence
        assert s3_server.secret not in sentence
        assert len(proxy.requests) == 1


def test_an_error_that_stays_ends_in_one_sentence(url, proxy, s3_server):
    for kind in ("error", "reset"):
        proxy.clear()
        proxy.inject(Fault(kind, count=None))
        with pytest.raises(OSError) as caught:
            replace_file(f"{url}/new", DATA)
        assert describe_error(caught.value)
        assert 4 <= len(proxy.requests) <= 8  # aiohttp asks twice where a connection was reset that it has used before


def test_a_silent_server_is_given_up(url, proxy, monkeypatch):
    monkeypatch.setattr("fsspec.config.conf", {"s3": {"config_kwargs": {"read_timeout": 0.3}}})
    proxy.inject(Fault("silent", count=4, seconds=2.0))
    with pytest.raises(OSError, match=r"(?i)timeout"):
        replace_file(f"{url}/new", DATA)
    assert [kind for _, _, kind in proxy.requests] == ["silent"] * 4


@pytest.mark.parametrize("kind", ["error", "reset", "short"])
@pytest.mark.parametrize("file", ["actor.training-1", "manifest.json"])
def test_a_set_is_committed_whole_or_not_at_all(url, proxy, kind, file):
    proxy.inject(Fault(kind, count=None, matches=puts(file)))
    with pytest.raises(OSError):
        write_small_set(f"{url}/step-00000003-1")
    with pytest.raises(DamagedState, match="missing"):
        read_state(f"{url}/step-00000003-1")
    proxy.clear()
    write_small_set(f"{url}/step-00000003-1")  # and what is there stands in nobody's way
    assert verify_state(f"{url}/step-00000003-1") == []


def test_a_commit_whose_every_answer_is_lost_stands(url, proxy):
    """The writer can't know, and is told so; the manifest is whole, and committing it again is no error."""
    proxy.inject(Fault("lost", count=None, matches=puts("manifest.json")))
    with pytest.raises(OSError):
        write_small_set(f"{url}/step-00000003-1")
    proxy.clear()
    assert verify_state(f"{url}/step-00000003-1") == []
    write_small_set(f"{url}/step-00000003-1")
