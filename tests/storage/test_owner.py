"""One driver a run: by a lock on one host, by signs of life across hosts, and fenced by the journal."""

import contextlib
import signal
import time

import pytest

from storage import host_lock, owner
from storage.journal import FencedOff, Journal
from storage.owner import DriverAlive, Owner, RunExists
from storage.small_files import file_exists, list_names, remove_file
from tests.services.processes import running_python

BODY = {"run_id": "run", "host": "thishost", "pid": 4711}
LONG_S = 60.0  # a lease that no test waits for
DRIVER = """
    import sys, tempfile, time
    tempfile.tempdir = sys.argv[2] or None
    from storage.owner import Owner
    owner = Owner.take_over(sys.argv[1], {"host": "there", "pid": 1}, lease_s=60)
    owner.journal.append("commit", {"step": 0})
    print("drives", flush=True)
    time.sleep(600)
"""

pytestmark = pytest.mark.usefixtures("lock_folder")


@contextlib.contextmanager
def another_host(monkeypatch, tmp_path):
    """What is taken over inside is taken over from a host that shares neither kernel nor locks with this one."""
    with monkeypatch.context() as patch:
        patch.setattr(host_lock, "_lock_path", lambda run_url: str(tmp_path / "elsewhere" / "driver.lock"))
        patch.setattr(host_lock, "_identity", lambda fd: ["another kernel", 1, 2])
        yield


def freeze(driver):
    """Make a driver give no sign of life any more: stopped by SIGSTOP, or cut off from the store."""
    driver._heartbeat._end.set()
    driver._heartbeat._thread.join()


def test_take_over_and_orderly_end(store_url, lock_folder):
    with Owner.take_over(store_url, BODY, lease_s=LONG_S, new=True) as driver:
        assert driver.number == 1
        driver.check()
        assert driver.journal.append("commit", {"step": 0}).number == 2
    with Owner.take_over(store_url, BODY, lease_s=LONG_S, new=False) as driver:
        assert driver.number == 3
        assert driver.journal.newest("commit").body == {"step": 0}
        assert driver.journal.newest("take_over").body.items() >= BODY.items()
    driver.close()
    assert list_names(f"{store_url}/journal") == ["00000001.json", "00000002.json", "00000003.json"]
    assert [path for path in lock_folder.rglob("*") if path.is_file()] == []


def test_a_new_run_wants_an_empty_journal_and_an_old_one_an_entry(store_url):
    with pytest.raises(ValueError, match=r"run_dir: .* holds no run; check the path"):
        Owner.take_over(store_url, BODY, lease_s=LONG_S, new=False)
    assert list_names(store_url) == []
    Owner.take_over(store_url, BODY, lease_s=LONG_S).close()
    with pytest.raises(RunExists, match=r"run_dir: .* already holds a run; choose another directory"):
        Owner.take_over(store_url, BODY, lease_s=LONG_S, new=True)
    assert list_names(f"{store_url}/journal") == ["00000001.json"]


def test_a_second_driver_in_the_process_is_refused(store_url):
    with Owner.take_over(store_url, BODY, lease_s=LONG_S) as driver:
        for _ in range(2):
            with pytest.raises(DriverAlive, match=r"run_dir: .* \(process 4711 on thishost\); stop that one, or wait"):
                Owner.take_over(store_url, BODY, lease_s=LONG_S)
        driver.check()
        driver.journal.append("commit", {"step": 0})


@pytest.mark.parametrize("store", ["disk", "s3"])
def test_a_driver_in_another_process_is_refused_while_it_lives_and_replaced_when_killed(
    store, request, tmp_path, lock_folder
):
    url = str(tmp_path / "run") if store == "disk" else request.getfixturevalue("s3_url")
    with running_python(DRIVER, url, str(lock_folder), until="drives") as process:
        with pytest.raises(DriverAlive, match="process 1 on there"):
            Owner.take_over(url, BODY, lease_s=LONG_S)
        process.send_signal(signal.SIGSTOP)  # held up is not dead
        with pytest.raises(DriverAlive):
            Owner.take_over(url, BODY, lease_s=LONG_S)
        process.send_signal(signal.SIGKILL)
        process.wait()
        with Owner.take_over(url, BODY, lease_s=LONG_S, new=False) as driver:  # at once, or the test's time is up
            assert driver.number == 3
    assert list_names(f"{url}/journal") == ["00000001.json", "00000002.json", "00000003.json"]


def test_a_beating_driver_of_another_host_is_refused(store_url, monkeypatch, tmp_path, caplog):
    with another_host(monkeypatch, tmp_path):
        other = Owner.take_over(store_url, BODY, lease_s=1.0)
    with other:
        with pytest.raises(DriverAlive, match="process 4711 on thishost"):
            Owner.take_over(store_url, BODY, lease_s=LONG_S)
        assert "waiting 60 s for a sign of life" in caplog.text
        other.check()
        other.journal.append("commit", {"step": 0})


def test_a_silent_driver_of_another_host_is_replaced_after_the_lease(store_url, monkeypatch, tmp_path):
    with another_host(monkeypatch, tmp_path):
        other = Owner.take_over(store_url, BODY, lease_s=1.0)
    freeze(other)
    begin = time.monotonic()
    with Owner.take_over(store_url, BODY, lease_s=0.1) as driver:
        assert time.monotonic() - begin >= 1.0  # the longer of both leases
        assert driver.number == 2
        for action in (other.check, lambda: other.journal.append("commit", {"step": 0}), other.check):
            with pytest.raises(FencedOff):
                action()
        other.close()  # awake again, it must not take the new driver's sign of life with it
        assert sum("heartbeat" in name for name in list_names(f"{store_url}/journal")) == 1
        driver.check()
        driver.journal.append("commit", {"step": 1})
    assert [entry.kind for entry in Journal(store_url).entries()] == ["take_over", "take_over", "commit"]


def test_an_orderly_end_on_another_host_needs_no_wait(store_url, monkeypatch, tmp_path):
    with another_host(monkeypatch, tmp_path):
        Owner.take_over(store_url, BODY, lease_s=LONG_S).close()
    Owner.take_over(store_url, BODY, lease_s=LONG_S).close()


def test_an_end_while_it_is_watched_needs_no_further_wait(store_url, monkeypatch, tmp_path):
    with another_host(monkeypatch, tmp_path):
        other = Owner.take_over(store_url, BODY, lease_s=LONG_S)
    watch = owner.watch
    monkeypatch.setattr(owner, "watch", lambda url, lease_s, tell: watch(url, lease_s, other.close))
    Owner.take_over(store_url, BODY, lease_s=LONG_S).close()


def test_of_two_that_watch_a_dead_driver_one_wins(store_url, monkeypatch, tmp_path):
    """The slower one of another host finds the record's number taken."""
    with another_host(monkeypatch, tmp_path):
        other = Owner.take_over(store_url, BODY, lease_s=0.2)
    freeze(other)
    winners = []

    def be_overtaken(url, lease_s, tell):
        with another_host(monkeypatch, tmp_path / "third"), monkeypatch.context() as patch:
            patch.setattr(owner, "watch", lambda url, lease_s, tell: False)
            winners.append(Owner.take_over(store_url, BODY, lease_s=LONG_S))
        return False

    monkeypatch.setattr(owner, "watch", be_overtaken)
    with pytest.raises(DriverAlive, match="process 4711"):
        Owner.take_over(store_url, BODY, lease_s=LONG_S)
    winners[0].check()
    winners[0].close()
    assert list_names(f"{store_url}/journal") == ["00000001.json", "00000002.json"]


def test_a_kill_before_the_record_leaves_no_driver(store_url, monkeypatch, tmp_path):
    Owner.take_over(store_url, BODY, lease_s=LONG_S).close()

    class Killed(BaseException):
        pass

    def die(*args):
        raise Killed

    with monkeypatch.context() as patch, another_host(monkeypatch, tmp_path), pytest.raises(Killed):
        patch.setattr(owner.Journal, "append", die)
        patch.setattr(owner.Heartbeat, "stop", lambda self: None)
        Owner.take_over(store_url, BODY, lease_s=LONG_S)
    assert len(list_names(f"{store_url}/journal")) == 2  # a heartbeat without a record
    Owner.take_over(store_url, BODY, lease_s=LONG_S).close()
    assert list_names(f"{store_url}/journal") == ["00000001.json", "00000002.json"]


def test_remains_of_killed_writers_go(tmp_path):
    Owner.take_over(str(tmp_path), BODY, lease_s=LONG_S).close()
    nonce = "0" * 32
    for name in (f".00000001.json.{nonce}.new", f".heartbeat-{nonce}.{nonce}.new", f"heartbeat-{nonce}"):
        (tmp_path / "journal" / name).touch()
    Owner.take_over(str(tmp_path), BODY, lease_s=LONG_S).close()
    assert list_names(tmp_path / "journal") == ["00000001.json", "00000002.json"]


@pytest.mark.parametrize(
    "facts",
    [
        None,
        [],
        {},
        {"heartbeat": "../../precious", "lock": None, "lease_s": 0.1},
        {"heartbeat": 5, "lock": [], "lease_s": "x"},
    ],
)
def test_hostile_records_lead_nowhere(tmp_path, monkeypatch, facts):
    monkeypatch.setattr(owner, "watch", lambda url, *rest: pytest.fail(f"it looks at {url}"))
    precious = tmp_path / "precious"
    precious.touch()
    Journal(str(tmp_path / "a/run")).append("take_over", {"owner": facts})
    Owner.take_over(str(tmp_path / "a/run"), BODY, lease_s=0.1).close()
    assert precious.exists()


def test_an_absurd_lease_in_a_record_is_not_waited_for(store_url, monkeypatch, tmp_path):
    with another_host(monkeypatch, tmp_path):
        other = Owner.take_over(store_url, BODY, lease_s=1e9)
    freeze(other)
    Owner.take_over(store_url, BODY, lease_s=0.1).close()


def test_a_store_that_refuses_the_heartbeat_leaves_no_lock(store_url, monkeypatch):
    def refuse(self):
        raise PermissionError("read-only")

    with monkeypatch.context() as patch, pytest.raises(PermissionError):
        patch.setattr(owner.Heartbeat, "beat", refuse)
        Owner.take_over(store_url, BODY, lease_s=LONG_S)
    Owner.take_over(store_url, BODY, lease_s=LONG_S, new=True).close()


def test_the_heartbeat_goes_on_after_a_failure(tmp_path, monkeypatch, caplog):
    with Owner.take_over(str(tmp_path), BODY, lease_s=0.3) as driver:
        (name,) = [name for name in list_names(tmp_path / "journal") if name.startswith("heartbeat-")]
        beat = driver._heartbeat.beat
        failures = []

        def fail_once(**options):
            if not failures:
                failures.append(1)
                raise OSError("the store is away")
            beat(**options)

        monkeypatch.setattr(driver._heartbeat, "beat", fail_once)
        remove_file(tmp_path / "journal" / name)
        while not file_exists(tmp_path / "journal" / name):
            time.sleep(0.01)
    assert "the store is away" in caplog.text
