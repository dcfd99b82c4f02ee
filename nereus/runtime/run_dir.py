"""The run directory: what a run leaves behind, at any fsspec URL. Its journal is the truth, run.yaml is for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nereus.config import RunConfig, dump_config
from storage.errors import describe_error, hide_credentials
from storage.exclusive import remove_leftovers
from storage.journal import Journal
from storage.records import append_record, keep_records, read_records
from storage.small_files import file_exists, replace_file
from storage.urls import local_path, open_filesystem

# One record a step each; a resumed run cuts them back to where it goes on.
_STEP_RECORDS = ("metrics.jsonl", "decisions.jsonl", "transitions.jsonl")


class RunDir:
    """RUN_DIR with `run.yaml`, `metrics.jsonl`, `journal/`, `state/`, `final/` and what other rooms add."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._made = False

    def check_free(self) -> None:
        """Raise ValueError when the directory holds a run, is a file, or can't be looked into."""
        try:
            filesystem, path = open_filesystem(self.url)
            if filesystem.isfile(path):
                raise NotADirectoryError("it is a file")
            found = self._exists("run.yaml") or bool(Journal(self.url).entries())
        except ValueError:
            raise
        except Exception as error:  # every store has errors of its own
            raise self.unusable("read", error) from error
        if found:
            raise self.taken()

    def note_before(self) -> None:
        """Remember whether the directory is there already, for `forget`."""
        self._made = not self._exists()

    def write_config(self, config: RunConfig) -> None:
        """Write `run.yaml`, the resolved config."""
        replace_file(self.path("run.yaml"), dump_config(config).encode())
        folder = local_path(self.url)
        if folder is not None:
            remove_leftovers(folder, "run.yaml")  # of drivers that were killed in the midst of this

    def forget(self) -> None:
        """Take away what a new run has written that failed before its first step.

        A directory that it has made goes with all in it; what was there before stays.
        """
        if self._made:
            self._remove("")
            return
        for name in ("run.yaml", "journal"):
            with suppress(FileNotFoundError):
                self._remove(name)

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def append_metrics(self, metrics: dict[str, Any], check: Callable[[], None] = lambda: None) -> None:
        """Add the line of a step; `check` raises when the run has another driver by now."""
        append_record(self.path("metrics.jsonl"), metrics, number=metrics["step"], check=check)

    def append_transition(self, transition: dict[str, Any], check: Callable[[], None] = lambda: None) -> None:
        """Add the line of a transition to transitions.jsonl, of which a step may have several; `check` as above."""
        append_record(self.path("transitions.jsonl"), transition, check=check)

    def replace_decisions(
        self, step: int, decisions: Sequence[dict[str, Any]], check: Callable[[], None] = lambda: None
    ) -> None:
        """Write the lines of a step in decisions.jsonl as they are known now; `check` as in `append_metrics`."""
        url = self.path("decisions.jsonl")
        keep_records(url, lambda record: record["step"] != step, check=check)
        for decision in decisions:
            append_record(url, decision, check=check)

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl, decisions.jsonl or transitions.jsonl, in order."""
        return read_records(self.path(name))

    def cut_back(self, first_step: int, check: Callable[[], None] = lambda: None) -> None:
        """Remove the records of `first_step` and later: these steps are done again; `check` as in `append_metrics`."""
        for name in _STEP_RECORDS:
            keep_records(self.path(name), lambda record: record["step"] < first_step, check=check)

    def taken(self) -> ValueError:
        """Return the refusal of a new run where there is one."""
        url = hide_credentials(self.url)
        return ValueError(
            f"run_dir: {url} already holds a run; choose another directory, or go on with `nereus resume {url}`."
        )

    def unusable(self, how: str, error: Exception) -> ValueError:
        """Return the refusal of a directory that can't be read or written."""
        url = hide_credentials(self.url)
        return ValueError(f"run_dir: {url} can't be {how} ({describe_error(error)}); choose another directory.")

    def _exists(self, name: str | None = None) -> bool:
        return file_exists(self.url if name is None else self.path(name))

    def _remove(self, name: str) -> None:
        filesystem, path = open_filesystem(self.path(name) if name else self.url)
        filesystem.rm(path, recursive=name != "run.yaml")
