"""One driver a run: take-over by a lock on the same host and by signs of life from another, fencing by the journal."""

from __future__ import annotations

import contextlib
import logging
import posixpath
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from storage.errors import describe_error, hide_credentials
from storage.exclusive import remove_leftovers
from storage.heartbeat import NAME, Heartbeat, heartbeat_url, watch
from storage.host_lock import HostLock, LockHeld
from storage.journal import Entry, FencedOff, Journal
from storage.retry import as_os_error
from storage.small_files import list_names, remove_files
from storage.urls import join_url, local_path

_LONGEST_LEASE_S = 3600.0
_log = logging.getLogger(__name__)


class DriverAlive(ValueError):
    """Another living driver has the run."""


class RunExists(ValueError):
    """A new run was to be begun where there is one."""


class Owner:
    """The right to drive a run, from the take-over to `close`.

    A driver that was held up and taken for dead is told by `FencedOff` at its next append or check.
    """

    def __init__(self, journal: Journal, entry: Entry, lock: HostLock, heartbeat: Heartbeat) -> None:
        """Made by `take_over`."""
        self.journal = journal
        self.number = entry.number
        self._lock = lock
        self._heartbeat = heartbeat

    @classmethod
    def take_over(cls, run_url: str, body: Mapping[str, Any], *, lease_s: float, new: bool | None = None) -> Owner:
        """Become the one driver of a run.

        A dead driver of this host is taken over at once; one of another host when its heartbeat has not changed for
        the lease (the longer of its own and this one), by the clock of this process.

        Args:
            run_url: the run's directory.
            body: of the take-over record; `host` and `pid` in it are told to who is refused.
            lease_s: how long others shall wait for a sign of life of this driver.
            new: True for a run that must not exist yet, False for one that must, None for either.

        Raises:
            DriverAlive: another living driver has the run (a ValueError that says what to do).
            RunExists: `new` and there is a run (a ValueError).
            ValueError: not `new` and there is none, or the journal is damaged.
            OSError: the store can't be read or written.
        """
        journal = Journal(run_url)
        _check_new(journal, new, run_url)
        with contextlib.ExitStack() as undo:
            try:
                lock = HostLock.acquire(run_url)
            except LockHeld:
                raise _alive(run_url, journal.newest("take_over")) from None
            undo.callback(lock.release)
            _check_new(journal, new, run_url)
            before = journal.newest("take_over")
            if before is not None and _lives(before, journal, lock, lease_s, run_url):
                raise _alive(run_url, before)
            url = heartbeat_url(journal.url)
            heartbeat = Heartbeat(url, lease_s / 3)
            heartbeat.beat()  # before the record: who finds the record and no heartbeat takes it for an orderly end
            undo.callback(heartbeat.stop)
            facts = {"heartbeat": posixpath.basename(url), "lock": lock.identity, "lease_s": lease_s}
            assert "owner" not in body
            try:
                entry = journal.append("take_over", {**body, "owner": facts})
            except FencedOff:
                raise _alive(run_url, Journal(run_url).newest("take_over")) from None
            heartbeat.start()
            undo.pop_all()
        _remove_remains(journal.url, posixpath.basename(url))
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


def _check_new(journal: Journal, new: bool | None, run_url: str) -> None:
    there = bool(journal.entries())
    where = hide_credentials(run_url)
    if new and there:
        raise RunExists(f"run_dir: {where} already holds a run; choose another directory, or resume that run.")
    if new is False and not there:
        raise ValueError(f"run_dir: {where} holds no run; check the path.")


def _lives(before: Entry, journal: Journal, lock: HostLock, lease_s: float, run_url: str) -> bool:
    """Return whether the driver of the take-over `before` gives a sign of life."""
    facts = before.body.get("owner")
    facts = facts if isinstance(facts, dict) else {}
    if lock.identity is not None and facts.get("lock") == lock.identity:
        return False  # it held the very lock that we hold now
    name, its_lease_s = facts.get("heartbeat"), facts.get("lease_s")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return False  # what we write always has one
    if isinstance(its_lease_s, int | float) and 0 < its_lease_s <= _LONGEST_LEASE_S:
        lease_s = max(lease_s, its_lease_s)

    def tell() -> None:
        who = _who(before) or " of another host"
        _log.warning(
            "%s has a driver%s that may still live; waiting %g s for a sign of life.",
            hide_credentials(run_url),
            who,
            lease_s,
        )

    return watch(join_url(journal.url, name), lease_s, tell)


def _remove_remains(folder_url: str, own_heartbeat: str) -> None:
    """Remove what dead drivers have left in the journal's folder; a failure is no harm."""
    try:
        marks = ("heartbeat-", ".heartbeat-")
        names = [name for name in list_names(folder_url) if name.startswith(marks) and own_heartbeat not in name]
        remove_files([join_url(folder_url, name) for name in names])
        folder = local_path(folder_url)
        if folder is not None:
            remove_leftovers(folder)
    except Exception as error:  # every store has errors of its own
        _log.warning("remains in %s stay: %s", hide_credentials(folder_url), describe_error(as_os_error(error)))


def _alive(run_url: str, entry: Entry | None) -> DriverAlive:
    return DriverAlive(
        f"run_dir: {hide_credentials(run_url)} is driven by another living process{_who(entry)}; "
        "stop that one, or wait for its end."
    )


def _who(entry: Entry | None) -> str:
    body = entry.body if entry is not None else {}
    return f" (process {body['pid']} on {body['host']})" if {"pid", "host"} <= body.keys() else ""
