"""The run directory: what a run leaves behind, at any fsspec URL."""

from __future__ import annotations

import errno
from typing import Any

from nereus.config import RunConfig, dump_config
from storage.records import append_record
from storage.urls import open_filesystem


class RunDir:
    """RUN_DIR with `run.yaml`, `metrics.jsonl`, `final/` and what other rooms add."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @classmethod
    def create(cls, url: str, config: RunConfig) -> RunDir:
        """Make the directory and write `run.yaml`, the resolved config; of two at the same time one succeeds.

        Raises:
            ValueError: it already holds a run.
        """
        run_dir = cls(url)
        run_dir.check_free()
        filesystem, path = open_filesystem(run_dir.path("run.yaml"))
        filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        try:
            filesystem.pipe_file(path, dump_config(config).encode(), mode="create")
        except FileExistsError:
            raise run_dir._taken() from None
        except OSError as error:
            if error.errno != errno.EINVAL:  # how some object stores answer a lost race
                raise
            raise run_dir._taken() from None
        return run_dir

    def check_free(self) -> None:
        """Raise ValueError when the directory holds a run."""
        filesystem, path = open_filesystem(self.path("run.yaml"))
        if filesystem.exists(path):
            raise self._taken()

    def forget(self) -> None:
        """Take `run.yaml` away again, after a start that failed before anything else was written."""
        filesystem, path = open_filesystem(self.path("run.yaml"))
        filesystem.rm_file(path)

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        append_record(self.path("metrics.jsonl"), metrics)

    def _taken(self) -> ValueError:
        return ValueError(f"run_dir: {self.url} already holds a run; choose another directory.")
