"""Plots of a run from its lines of metrics.jsonl: each function takes the lines and returns a figure.

Figures are made without pyplot: no global state, so a flow's threads may draw at the same time.
"""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Metrics = dict[str, Any]

INK, FAINT, GRID = "#1f2937", "#6b7280", "#e5e7eb"
BLUE, AMBER, TEAL, VIOLET = "#2563eb", "#d97706", "#0d9488", "#7c3aed"
STAGE_COLORS = {
    "generation": BLUE,
    "inference": TEAL,
    "training": VIOLET,
    "weight_sync": AMBER,
    "transition": "#e11d48",
    "staging": "#64748b",
    "orchestration": "#cbd5e1",
}


def draw_reward(history: Sequence[Metrics]) -> Figure:
    """Mean reward by step with a band of one standard deviation."""
    figure, axes = _new_axes("reward")
    steps, mean, std = (_column(history, key) for key in ("step", "reward_mean", "reward_std"))
    axes.fill_between(steps, mean - std, mean + std, color=BLUE, alpha=0.12, linewidth=0)
    _line(axes, steps, mean, BLUE, "mean")
    return figure


def draw_kl(history: Sequence[Metrics]) -> Figure:
    """KL to the reference a response token, by both estimators."""
    figure, axes = _new_axes("nats a token")
    steps = _column(history, "step")
    _line(axes, steps, _column(history, "kl_k1"), VIOLET, "k1")
    _line(axes, steps, _column(history, "kl_k3"), TEAL, "k3", style="--")
    _legend(axes)
    return figure


def draw_lengths(history: Sequence[Metrics]) -> Figure:
    """Response length: mean and 95th percentile."""
    figure, axes = _new_axes("tokens")
    steps, mean = _column(history, "step"), _column(history, "response_tokens_mean")
    p95 = _column(history, "response_tokens_p95")
    axes.fill_between(steps, mean, p95, color=AMBER, alpha=0.12, linewidth=0)
    _line(axes, steps, mean, AMBER, "mean")
    _line(axes, steps, p95, FAINT, "95th percentile", style="--")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def draw_seconds(history: Sequence[Metrics]) -> Figure:
    """Seconds of each step, stacked by stage; stages that never ran are left out."""
    figure, axes = _new_axes("seconds")
    steps, bottom = _column(history, "step"), np.zeros(len(history))
    for stage, color in STAGE_COLORS.items():
        seconds = np.array([line.get("seconds", {}).get(stage, 0.0) for line in history], dtype=float)
        if seconds.any():
            axes.bar(steps, seconds, 0.8, bottom=bottom, color=color, label=stage.replace("_", " "), linewidth=0)
            bottom += seconds
    axes.margins(x=0.02)
    # Headroom for the legend, which would else lie on the bars.
    axes.set_ylim(0, 1.28 * max(bottom.max(initial=0.0), 1e-9))
    _legend(axes, columns=3)
    return figure


PLOTS: dict[str, Callable[[Sequence[Metrics]], Figure]] = {
    "Reward": draw_reward,
    "Response length": draw_lengths,
    "KL to the reference": draw_kl,
    "Seconds by stage": draw_seconds,
}


def draw_run_pngs(history: Sequence[Metrics]) -> list[tuple[str, bytes]]:
    """Return every plot of a run as (title, PNG bytes); none for a run without steps."""
    return [(title, _render(draw(history), "png")) for title, draw in PLOTS.items()] if history else []


def draw_run_svgs(history: Sequence[Metrics]) -> list[tuple[str, str]]:
    """Return every plot of a run as (title, an <svg> element for an HTML page); none for a run without steps."""
    if not history:
        return []
    texts = [(title, _render(draw(history), "svg").decode()) for title, draw in PLOTS.items()]
    return [(title, text[text.index("<svg") :]) for title, text in texts]


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150)
    return buffer.getvalue()


def _new_axes(unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_ylabel(unit, color=FAINT, fontsize=9)
    axes.set_xlabel("step", color=FAINT, fontsize=9)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    return figure, axes


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str, style: str = "-") -> None:
    # A single step has no line to draw: mark the points of short runs.
    axes.plot(x, y, style, color=color, linewidth=1.8, label=label, marker="o" if len(x) < 12 else "", markersize=3.5)


def _legend(axes: Axes, columns: int = 2) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=columns, loc="best")


def _column(history: Sequence[Metrics], key: str) -> np.ndarray:
    """Return one number a step; NaN, which plots skip, where a line has none."""
    return np.array([np.nan if line.get(key) is None else line[key] for line in history], dtype=float)
