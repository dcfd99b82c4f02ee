"""Artifacts of a run for Prefect's UI: progress, plan table, plots. A view: nothing is read back from them."""

import base64
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)


def publish_plan(plan: Mapping[str, Mapping[str, Any]]) -> None:
    """Show where each model-stage runs; `plan` = {model-stage: {dp, tp, pp, devices, micro_batch, recompute}}."""
    rows = [{"model-stage": name, **{key: str(value) for key, value in entry.items()}} for name, entry in plan.items()]
    create_table_artifact(rows, key="plan", description="Replicas (dp), layout (tp x pp) and devices")


class ProgressArtifact:
    """How far a run is, in words; written at most once a second, so that short steps don't wait for it."""

    MIN_INTERVAL_S = 1.0

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._id: Any = create_progress_artifact(0.0, key="progress", description=f"0 of {num_steps} steps")
        self._written_s = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` has ended, with its reward and response length; the last step is always shown."""
        is_last = step + 1 == self._num_steps
        if not is_last and time.monotonic() - self._written_s < self.MIN_INTERVAL_S:
            return
        reward, length = metrics.get("reward_mean", 0.0), metrics.get("response_tokens_mean", 0.0)
        text = f"{step + 1} of {self._num_steps} steps; reward {reward:.3f}, {length:.1f} tokens a response"
        update_progress_artifact(self._id, progress=100.0 * (step + 1) / self._num_steps, description=text)
        self._written_s = time.monotonic()


def publish_plots(plots: Sequence[tuple[str, bytes]]) -> None:
    """Show PNG plots, each with its title, as one markdown page (inline SVG is dropped by the UI)."""
    pages = [
        f"## {title}\n\n![{title}](data:image/png;base64,{base64.b64encode(png).decode()})" for title, png in plots
    ]
    create_markdown_artifact("\n\n".join(pages), key="plots", description="Reward, KL, lengths and seconds by step")
