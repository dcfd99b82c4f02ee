"""Artifacts of a run for Prefect's UI: progress, plan table, plots. A view: nothing is read back from them."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

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


def open_progress(num_steps: int) -> UUID:
    """Show 0 of `num_steps` steps; the returned id is for `update_progress`."""
    artifact = create_progress_artifact(0.0, key="progress", description=f"0 of {num_steps} steps")
    return artifact if isinstance(artifact, UUID) else UUID(str(artifact))


def update_progress(artifact: UUID, step: int, num_steps: int, metrics: Mapping[str, Any]) -> None:
    """Show how far the run is, and the newest reward and length in words."""
    reward, length = metrics.get("reward_mean", 0.0), metrics.get("response_tokens_mean", 0.0)
    text = f"{step + 1} of {num_steps} steps; reward {reward:.3f}, {length:.1f} tokens a response"
    update_progress_artifact(artifact, progress=100.0 * (step + 1) / num_steps, description=text)


def publish_plots(plots: Sequence[tuple[str, bytes]]) -> None:
    """Show PNG plots, each with its title, as one markdown page (inline SVG is dropped by the UI)."""
    pages = [
        f"## {title}\n\n![{title}](data:image/png;base64,{base64.b64encode(png).decode()})" for title, png in plots
    ]
    create_markdown_artifact("\n\n".join(pages), key="plots", description="Reward, KL, lengths and seconds by step")
