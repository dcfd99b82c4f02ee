"""One driver a run: who may write the journal, found by a lock on the same host and by a heartbeat from another."""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from storage.errors import describe_error, hide_credentials
from storage.host_lock import HostLock, LockHeld
from storage.journal import Entry, FencedOff, Journal
from storage.small_files import read_file, remove_file, replace_file
from storage.urls import join_url

_log = logging.getLogger(__name__)


class DriverAlive(ValueError):
    """Another living driver has the run."""


class RunExists(ValueError):
    """A new run was to be begun where there is one."""


class Owner:
    """The right to drive a run, from the take-over to `close`.

    Whoever lost it is told by `FencedOff` at its next append or check: a driver that was held up, and taken for dead.
    """

    def __init__(self, journal: Journal, entry: Entry, lock: HostLock, heartbeat: _Heartbeat) -> None:
        self.journal = journal
        self.number = entry.number
        self._lock = lock
        self._heartbeat = heartbeat

    @classmethod
    def take_over(cls, run_url: str, body: Mapping[str, Any], *, lease_s: float, new: bool | None = None) -> Owner:
        """Become the one driver of a run.

        A dead driver of this host is taken over at once; one of another host when its heartbeat has not changed for
        the lease, measured by the clock of this process.

        Args:
            run_url: the run's directory.
            body: of the take-over record.
            lease_s: how long others shall wait for a sign of life of this driver.
            new: True for a run that must not exist yet, False for one that must, None for either.

        Raises:
            DriverAlive: another living driver has the run (a ValueError that says what to do).
            RunExists: `new` and there is a run (a ValueError).
            ValueError: not `new` and there is none, or the journal is damaged.
            OSError: the store can't be read or written.
        """
        where = hide_credentials(run_url)
        journal = Journal(run_url)
        _check_new(journal, new, where)
        try:
            lock = HostLock.acquire(run_url)
        except LockHeld:
            raise _alive(where, journal.newest("take_over")) from None
        heartbeat = _Heartbeat(journal.url, uuid.uuid4().hex, lease_s)
        try:
            _check_new(journal, new, where)
            before = journal.newest("take_over")
            _wait_for_death(journal, before, lock, lease_s, where)
            heartbeat.beat()
            owner = {"heartbeat": heartbeat.name, "lock": lock.identity, "lease_s": lease_s}
            assert "owner" not in body
            entry = journal.append("take_over", {**body, "owner": owner})
        except FencedOff:
            heartbeat.stop()
            lock.release()
            raise _alive(where, Journal(run_url).newest("take_over")) from None
        except BaseException:
            heartbeat.stop()
            lock.release()
            raise
        heartbeat.start()
        if before is not None:
            remove_file(join_url(journal.url, _owner_of(before)["heartbeat"]))
        return cls(journal, entry, lock, heartbeat)

    def check(self) -> None:
        """Raise FencedOff if another driver has taken over."""
        self.journal.check()

    def close(self) -> None:
        """Give the run up in good order: the next driver need not wait. Doing it twice is safe."""
        self._heartbeat.stop()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Heartbeat:
    """A small object that changes every third of the lease while the driver lives, and goes with its orderly end."""

    def __init__(self, folder_url: str, name: str, lease_s: float) -> None:
        self.name = f"heartbeat-{name}"
        self._url = join_url(folder_url, self.name)
        self._lease_s = lease_s
        self._count = 0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self) -> None:
        self._count += 1
        replace_file(self._url, json.dumps({"beat": self._count}).encode())

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        try:
            remove_file(self._url)
        except OSError as error:
            _log.warning("%s stays behind: %s", hide_credentials(self._url), describe_error(error))

    def _run(self) -> None:
        while not self._end.wait(self._lease_s / 3):
            try:
                self.beat()
            except OSError as error:
                _log.warning("the driver's sign of life can't be written: %s", describe_error(error))


def _check_new(journal: Journal, new: bool | None, where: str) -> None:
    there = bool(journal.entries())
    if new and there:
        raise RunExists(f"run_dir: {where} already holds a run; choose another directory, or resume that run.")
    if new is False and not there:
        raise ValueError(f"run_dir: {where} holds no run; check the path.")


def _owner_of(entry: Entry) -> dict[str, Any]:
    return entry.body["owner"]


def _wait_for_death(journal: Journal, before: Entry | None, lock: HostLock, lease_s: float, where: str) -> None:
    """Return when the driver of the take-over `before` is gone; DriverAlive when it gives a sign of life."""
    if before is None:
        return
    owner = _owner_of(before)
    if lock.identity is not None and owner["lock"] == lock.identity:
        return  # it held the very lock that we hold now
    url = join_url(journal.url, owner["heartbeat"])
    first = _read_beat(url)
    end = time.monotonic() + max(lease_s, owner["lease_s"])
    while (now := time.monotonic()) < end:
        beat = _read_beat(url)
        if beat is None:
            return
        if beat != first:
            raise _alive(where, before)
        time.sleep(min(end - now, max(lease_s / 20, 0.05)))


def _read_beat(url: str) -> bytes | None:
    try:
        return read_file(url)
    except FileNotFoundError:
        return None


def _alive(where: str, entry: Entry | None) -> DriverAlive:
    body = entry.body if entry is not None else {}
    who = f" (process {body['pid']} on {body['host']})" if {"pid", "host"} <= body.keys() else ""
    return DriverAlive(
        f"run_dir: {where} is driven by another living process{who}; stop that one, or wait for its end."
    )
