"""The commits of a run: which ones its journal names, which still count, and opening one of them for reading."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from storage.errors import hide_credentials
from storage.journal import Entry
from storage.manifest import MANIFEST_NAME, DamagedState, Manifest
from storage.retention import being_read
from storage.small_files import file_exists, list_names
from storage.state import read_state
from storage.urls import join_url, open_filesystem
from storage.writable import describe_access


@dataclass(frozen=True)
class Commit:
    """The state at the end of a step, as the journal names it.

    `set_name` is its folder in the staging root, `manifest` the checksum of its manifest.
    """

    number: int
    step: int
    set_name: str
    manifest: str

    @classmethod
    def of(cls, entry: Entry) -> Commit:
        return cls(entry.number, int(entry.body["step"]), str(entry.body["set"]), str(entry.body["manifest"]))


def list_commits(entries: Iterable[Entry]) -> tuple[Commit, ...]:
    """Return all commits that a journal names, oldest first."""
    return tuple(Commit.of(entry) for entry in entries if entry.kind == "commit")


def live_commits(entries: Iterable[Entry]) -> tuple[Commit, ...]:
    """Return the commits that a run could go on from, by step.

    Of a run that went on from an earlier step the later ones count until they are written anew.
    """
    live: list[Commit] = []
    for commit in list_commits(entries):
        live = [earlier for earlier in live if earlier.step < commit.step]
        live.append(commit)
    return tuple(live)


def read_commit(root: str, commit: Commit) -> Manifest:
    """Return a commit's manifest, which must be the one that the journal names.

    Raises:
        DamagedState: it is missing, damaged, or another one.
        OSError: it can't be read.
    """
    url = join_url(root, commit.set_name)
    if not file_exists(join_url(url, MANIFEST_NAME)):
        raise DamagedState(
            f"{hide_credentials(url)} is gone, though step {commit.step} was committed there; use another commit."
        )
    manifest = read_state(url)
    if manifest.checksum != commit.manifest or manifest.step != commit.step:
        raise DamagedState(
            f"{hide_credentials(url)}/manifest.json is not the one that was committed for step {commit.step}; "
            "use another commit."
        )
    return manifest


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Keep a set from being retired while it is read, where its place is a run's and lets us say so."""
    root, name = posixpath.split(url.rstrip("/"))
    with ExitStack() as stack:
        # A folder of another name is no run's; of a reader without the right to write the run can't know.
        with suppress(OSError, ValueError):
            stack.enter_context(being_read(root or ".", name))
        yield


def look_into(url: str) -> set[str]:
    """Return the names of what lies in a folder, none where there is no folder.

    Raises:
        ValueError: it is a file, or can't be looked into.
    """
    try:
        filesystem, path = open_filesystem(url)
        if filesystem.isfile(path):
            raise NotADirectoryError("it is a file")
        return set(list_names(url))
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"{hide_credentials(url)} can't be read {describe_access(error)}.") from error
