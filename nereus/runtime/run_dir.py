"""The run directory: what a run leaves behind, at any fsspec URL."""

from __future__ import annotations

from typing import Any

from nereus.config import RunConfig, dump_config
from storage.errors import describe_error, hide_credentials
from storage.exclusive import create_exclusively
from storage.records import append_record
from storage.urls import open_filesystem


class RunDir:
    """RUN_DIR with `run.yaml`, `metrics.jsonl`, `final/` and what other rooms add."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._made = False

    @classmethod
    def create(cls, url: str, config: RunConfig) -> RunDir:
        """Make the directory and write `run.yaml`, the resolved config; of two at the same time one succeeds.

        Raises:
            ValueError: it already holds a run, or can't be written.
        """
        run_dir = cls(url)
        try:
            run_dir._made = not run_dir._exists()
            create_exclusively(run_dir.path("run.yaml"), dump_config(config).encode())
        except FileExistsError:
            raise run_dir._taken() from None
        except Exception as error:  # every store has errors of its own
            raise run_dir._unusable("written", error) from error
        return run_dir

    def check_free(self) -> None:
        """Raise ValueError when the directory holds a run, is a file, or can't be looked into."""
        try:
            filesystem, path = open_filesystem(self.url)
            if filesystem.isfile(path):
                raise NotADirectoryError("it is a file")
            found = self._exists("run.yaml")
        except Exception as error:
            raise self._unusable("read", error) from error
        if found:
            raise self._taken()

    def forget(self) -> None:
        """Take `run.yaml` away again, after a start that failed before the first step.

        A directory that `create` has made goes with all in it; what was there before stays.
        """
        filesystem, path = open_filesystem(self.url if self._made else self.path("run.yaml"))
        filesystem.rm(path, recursive=self._made)

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        append_record(self.path("metrics.jsonl"), metrics)

    def _exists(self, name: str | None = None) -> bool:
        filesystem, path = open_filesystem(self.url if name is None else self.path(name))
        return filesystem.exists(path)

    def _taken(self) -> ValueError:
        return ValueError(f"run_dir: {hide_credentials(self.url)} already holds a run; choose another directory.")

    def _unusable(self, how: str, error: Exception) -> ValueError:
        url = hide_credentials(self.url)
        return ValueError(f"run_dir: {url} can't be {how} ({describe_error(error)}); choose another directory.")
