"""The run directory: what a run leaves behind, at any fsspec URL."""

from __future__ import annotations

from typing import Any

import fsspec

from nereus.config import RunConfig, dump_config
from storage.records import append_record


class RunDir:
    """RUN_DIR with `run.yaml`, `metrics.jsonl`, `final/` and what other rooms add."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    @classmethod
    def create(cls, url: str, config: RunConfig) -> RunDir:
        """Make the directory and write `run.yaml`, the resolved config.

        Raises:
            ValueError: it already holds a run.
        """
        run_dir = cls(url)
        filesystem, path = fsspec.core.url_to_fs(run_dir.path("run.yaml"))
        if filesystem.exists(path):
            raise ValueError(f"run_dir: {url} already holds a run; choose another directory.")
        filesystem.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
        with filesystem.open(path, "w") as file:
            file.write(dump_config(config))
        return run_dir

    def path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def append_metrics(self, metrics: dict[str, Any]) -> None:
        append_record(self.path("metrics.jsonl"), metrics)
