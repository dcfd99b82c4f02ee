"""The journal of a run: numbered records, each created whole by the one writer that takes its number."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from storage.errors import hide_credentials
from storage.exclusive import create_exclusively
from storage.small_files import file_exists, list_names, read_file, read_files
from storage.urls import join_url

KINDS = ("take_over", "commit", "transition")
_NAME = re.compile(r"(\d{8})\.json")
_MEND = "bring it back from a copy, or move it and the entries after it away to go on from the commit before."


class FencedOff(RuntimeError):
    """Another driver has taken over: whoever gets this must write nothing more."""


class DamagedJournal(ValueError):
    """An entry of the journal is missing, torn or altered; the sentence names it and the mend."""


@dataclass(frozen=True)
class Entry:
    """One record; numbers count from 1 without holes. `nonce` tells whose it is: writer, dot, count of its appends."""

    number: int
    kind: str
    body: dict[str, Any]
    nonce: str = field(default="", compare=False)


class Journal:
    """RUN_DIR/journal/00000001.json, 00000002.json, ... as one reader or writer sees it.

    A writer appends at the number after the last that it has seen; where another has taken that number since, or has
    written anything after the writer's first entry, it has lost the run for good. This is the fencing token: no clock
    and no lock has a part in it. Safe to use from several threads.
    """

    def __init__(self, url: str) -> None:
        """Read nothing yet.

        Args:
            url: the run's directory; the journal lies in its folder `journal`.
        """
        self.run_url = url.rstrip("/") or "/"
        self.url = join_url(self.run_url, "journal")
        self._writer = uuid.uuid4().hex
        self._appends = 0
        self._entries: list[Entry] = []
        self._owns = False  # an entry of ours is there
        self._fenced = False  # and one of another writer in a place that was to be ours
        self._lock = threading.RLock()

    def entries(self) -> list[Entry]:
        """Return all entries in order, those included that others have appended since.

        Raises:
            DamagedJournal: an entry is missing, torn or altered.
            OSError: the store can't be read.
        """
        with self._lock:
            found = [int(match[1]) for match in map(_NAME.fullmatch, list_names(self.url)) if match]
            # A number that the listing lacks may be newer than the listing: it is asked for by name.
            numbers = range(len(self._entries) + 1, max(found, default=0) + 1)
            for number, data in zip(numbers, self._read(numbers), strict=True):
                self._see(_parse(data, number, self._path(number)))
            return list(self._entries)

    def newest(self, kind: str) -> Entry | None:
        """Return the last entry of a kind, None when there is none."""
        return next((entry for entry in reversed(self.entries()) if entry.kind == kind), None)

    def append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        """Add an entry after the last one seen; it is durable when this returns.

        Doing it again after an OSError is safe: an entry that had arrived all the same is not written twice.

        Raises:
            FencedOff: another writer has appended since.
            ValueError: the body holds what JSON doesn't know.
            OSError: the store can't be written.
        """
        assert kind in KINDS, kind
        plain: dict[str, Any] = json.loads(json.dumps(dict(body), allow_nan=False))
        with self._lock:
            self._appends += 1
            while True:
                self._refuse_if_fenced()
                entry = Entry(len(self._entries) + 1, kind, plain, f"{self._writer}.{self._appends}")
                try:
                    create_exclusively(self._path(entry.number), _dump(entry))
                except FileExistsError:
                    taken = self._read_taken(entry.number)
                    self._see(taken)
                    if taken != entry:  # an earlier append of ours, whose answer never came
                        continue
                    return taken
                self._see(entry)
                return entry

    def check(self) -> None:
        """Raise FencedOff if another writer has appended since."""
        with self._lock:
            self._refuse_if_fenced()
            while file_exists(self._path(len(self._entries) + 1)):
                self._see(self._read_taken(len(self._entries) + 1))

    def _path(self, number: int) -> str:
        return join_url(self.url, f"{number:08d}.json")

    def _is_ours(self, entry: Entry) -> bool:
        return entry.nonce.partition(".")[0] == self._writer

    def _see(self, entry: Entry) -> None:
        ours = self._is_ours(entry)
        self._fenced |= self._owns and not ours
        self._owns |= ours
        self._entries.append(entry)

    def _refuse_if_fenced(self) -> None:
        if self._fenced:
            raise FencedOff(f"another driver has taken over {hide_credentials(self.run_url)}; this one stops.")

    def _read_taken(self, number: int) -> Entry:
        """Return the entry that has a number which was to be ours, if it is ours after all; else FencedOff."""
        try:
            entry = _parse(read_file(self._path(number)), number, self._path(number))
        except ValueError:  # whatever it is, it isn't ours
            entry = None
        if entry is None or not self._is_ours(entry):
            self._fenced = True
            self._refuse_if_fenced()
        assert entry is not None
        return entry

    def _read(self, numbers: range) -> list[bytes]:
        paths = [self._path(number) for number in numbers]
        try:
            return read_files(paths)
        except FileNotFoundError as error:
            missing = next((path for path in paths if not file_exists(path)), None)
            if missing is None:
                raise
            raise DamagedJournal(
                f"{hide_credentials(missing)} is missing, though later entries are there; {_MEND}"
            ) from error
        except ValueError as error:  # too large, or no file
            raise DamagedJournal(
                f"an entry in {hide_credentials(self.url)} can't be read ({error}); {_MEND}"
            ) from error


class _Wrong(ValueError):
    """What is wrong with an entry."""


def _dump(entry: Entry) -> bytes:
    fields = {"number": entry.number, "kind": entry.kind, "nonce": entry.nonce, "body": entry.body}
    text = json.dumps(fields, separators=(",", ":"))
    return f'{text[:-1]},"checksum":"{xxhash.xxh3_128_hexdigest(text.encode())}"}}\n'.encode()


def _parse(data: bytes, number: int, where: str) -> Entry:
    try:
        return _parse_fields(data, number)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _Wrong) else "it is no JSON"
        raise DamagedJournal(f"{hide_credentials(where)} is damaged ({reason}); {_MEND}") from error


def _parse_fields(data: bytes, number: int) -> Entry:
    fields = json.loads(data)
    if not isinstance(fields, dict) or set(fields) != {"number", "kind", "nonce", "body", "checksum"}:
        raise _Wrong("it has other fields than an entry")
    entry = Entry(fields["number"], fields["kind"], fields["body"], fields["nonce"])
    if not isinstance(entry.body, dict) or entry.kind not in KINDS or not isinstance(entry.nonce, str):
        raise _Wrong("a field has a wrong value")
    if _dump(entry) != data:
        raise _Wrong("its checksum is wrong")
    if entry.number != number:
        raise _Wrong(f"it holds entry {entry.number}")
    return entry
