"""The lock of one host: exclusive through removal and re-creation of its file."""

import fcntl
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage import host_lock
from storage.host_lock import HostLock, LockHeld


def test_it_is_exclusive_and_leaves_nothing(tmp_path):
    lock = HostLock.acquire(str(tmp_path))
    with pytest.raises(LockHeld):
        HostLock.acquire(str(tmp_path))
    lock.release()
    lock.release()
    assert os.listdir(tmp_path / "journal") == []


def test_a_link_to_the_run_meets_at_the_same_lock(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    lock = HostLock.acquire(str(tmp_path / "run"))
    with pytest.raises(LockHeld):
        HostLock.acquire(str(tmp_path / "link"))
    lock.release()


def test_never_two_holders_while_the_file_comes_and_goes(tmp_path):
    holders, most = [], []
    counted = threading.Lock()

    def work(number):
        for _ in range(100):
            try:
                lock = HostLock.acquire(str(tmp_path))
            except LockHeld:
                continue
            with counted:
                holders.append(number)
                most.append(len(holders))
            with counted:
                holders.remove(number)
            lock.release()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert max(most) == 1


def test_a_file_removed_between_open_and_lock_is_no_lock(tmp_path, monkeypatch):
    """Its holder ends just then, and another one comes: the lock that we get is on a file nobody else will open."""
    first = HostLock.acquire(str(tmp_path))
    flock = fcntl.flock
    second = []

    def change_holder(fd, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()
        second.append(HostLock.acquire(str(tmp_path)))
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", change_holder)
    with pytest.raises(LockHeld):
        HostLock.acquire(str(tmp_path))
    second[0].release()


def test_the_killed_holders_file_is_met_again(tmp_path):
    lock = HostLock.acquire(str(tmp_path))
    identity = lock.identity
    os.close(lock._fd)  # what a kill does
    assert HostLock.acquire(str(tmp_path)).identity == identity is not None


def test_file_systems_without_locks_have_none(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = HostLock.acquire(str(tmp_path))
    assert lock.identity is None
    lock.release()


def test_locks_of_remote_runs_lie_in_a_folder_of_the_user(lock_folder):
    lock = HostLock.acquire("memory://bucket/run")
    (folder,) = lock_folder.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    with pytest.raises(LockHeld):
        HostLock.acquire("memory://bucket/run/")
    other = HostLock.acquire("memory://bucket/other")
    other.release()
    lock.release()
    assert list(folder.iterdir()) == []


def test_endpoints_have_locks_of_their_own(lock_folder, monkeypatch):
    paths = []
    for endpoint in ("http://a:1", "http://b:1"):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
        paths.append(host_lock._lock_path("s3://bucket/run"))
    assert paths[0] != paths[1]


@pytest.mark.parametrize("kind", ["link", "file", "open"])
def test_a_folder_that_others_can_write_is_not_used(lock_folder, kind):
    path = lock_folder / f"nereus-{os.getuid()}"
    if kind == "link":
        (lock_folder / "theirs").mkdir()
        path.symlink_to("theirs")
    elif kind == "file":
        path.touch()
    else:
        path.mkdir()
        path.chmod(0o777)
    with pytest.raises(PermissionError, match="remove it or set TMPDIR"):
        HostLock.acquire("memory://bucket/run")
