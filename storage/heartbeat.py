"""Signs of life: a small object that changes while its writer lives, watched by others with clocks of their own."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from storage.errors import describe_error, hide_credentials
from storage.retry import as_os_error
from storage.small_files import read_file, remove_file, replace_file
from storage.urls import join_url

NAME = re.compile(r"heartbeat-[0-9a-f]{32}")
_STOP_LIMIT_S = 5.0  # a beat that takes longer hangs, and so would the removal
_log = logging.getLogger(__name__)


class Heartbeat:
    """An object that changes every `interval_s` until it is stopped, and is removed then: the sign of an orderly end.

    The writer's clock is in none of it: who watches waits for a change by a clock of its own.
    """

    def __init__(self, url: str, interval_s: float, facts: Mapping[str, Any] | None = None) -> None:
        """Write nothing yet.

        Args:
            url: of the object.
            interval_s: between two beats.
            facts: what else every sign says.
        """
        self._url = url
        self._interval_s = interval_s
        self._facts = dict(facts or {})
        self._count = 0
        self._id = uuid.uuid4().hex  # two writers' first beats differ
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, *, patient: bool = True) -> None:
        """Write the next sign; an OSError when the store refuses it."""
        self._count += 1
        sign = {**self._facts, "writer": self._id, "beat": self._count}
        replace_file(self._url, json.dumps(sign).encode(), patient=patient)

    def start(self) -> None:
        """Beat in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="nereus-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and remove the object; where the store hangs it stays. Doing it twice is safe."""
        self._end.set()
        if self._thread is not None:
            self._thread.join(_STOP_LIMIT_S)
            if self._thread.is_alive():
                _log.warning("%s stays behind: its store doesn't answer", hide_credentials(self._url))
                return
        try:
            remove_file(self._url, patient=False)
        except Exception as error:  # every store has errors of its own, and the end of a run must not fail by this
            _log.warning("%s stays behind: %s", hide_credentials(self._url), describe_error(as_os_error(error)))

    def _run(self) -> None:
        failing = False
        while not self._end.wait(self._interval_s / 4 if failing else self._interval_s):
            try:
                self.beat(patient=False)
                failing = False
            except Exception as error:  # the next one may succeed; without any, others will take over
                if not failing:
                    _log.warning("signs of life can't be written: %s", describe_error(as_os_error(error)))
                failing = True


def heartbeat_url(folder_url: str) -> str:
    """Return the URL of a new heartbeat in a folder."""
    return join_url(folder_url, f"heartbeat-{uuid.uuid4().hex}")


def watch(url: str, lease_s: float, on_wait: Callable[[], None] = lambda: None) -> bool:
    """Return whether the writer of a heartbeat lives: True at the first change, False when none comes within the lease.

    False at once when the heartbeat is not there, or goes while it is watched.

    Args:
        url: of the heartbeat.
        lease_s: how long to wait for a change, by the clock of this process.
        on_wait: called once, before the wait.
    """
    first = _read(url)
    if first is None:
        return False
    on_wait()
    end = time.monotonic() + lease_s
    while (left_s := end - time.monotonic()) > 0:
        time.sleep(min(left_s, lease_s / 20, 1.0))
        now = _read(url)
        if now != first:
            return now is not None
    return False


def _read(url: str) -> bytes | None:
    try:
        return read_file(url)
    except FileNotFoundError:
        return None
