"""Plots of a run from its lines of metrics.jsonl: each function takes the lines and returns a figure.

Figures are made without pyplot: no global state, so a flow's threads may draw at the same time. Colours are Okabe and
Ito's, which every kind of colour vision tells apart.
"""

import html
import io
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nereus.report.plans import compare_with_first_plan

Metrics = dict[str, Any]

INK, FAINT, GRID = "#1f2937", "#5b6472", "#e5e7eb"
BLUE, AMBER, TEAL, VIOLET = "#0072b2", "#e69f00", "#009e73", "#cc79a7"
SKY, VERMILION = "#56b4e9", "#d55e00"
STAGE_COLORS = {
    "generation": BLUE,
    "inference": SKY,
    "training": AMBER,
    "weight_sync": TEAL,
    "transition": "#8c1d40",  # far darker than the stages below it
    "staging": VIOLET,
    "orchestration": "#c3c9d1",
}
# Beyond so many steps the bars would touch; then there is one outline, and each point is the mean of several steps.
MOST_BARS, MOST_POINTS = 90, 250


def draw_reward(history: Sequence[Metrics]) -> Figure:
    """Mean reward by step with a band of one standard deviation."""
    figure, axes = _new_axes("reward")
    steps, mean, std = (column(history, key) for key in ("step", "reward_mean", "reward_std"))
    axes.fill_between(steps, mean - std, mean + std, color=BLUE, alpha=0.15, linewidth=0, label="± 1 std")
    _line(axes, steps, mean, BLUE, "mean")
    draw_legend(axes)
    return figure


def draw_kl(history: Sequence[Metrics]) -> Figure:
    """KL to the reference a response token, by both estimators."""
    figure, axes = _new_axes("nats a token")
    steps = column(history, "step")
    _line(axes, steps, column(history, "kl_k1"), BLUE, "k1")
    _line(axes, steps, column(history, "kl_k3"), VERMILION, "k3", style="--")
    draw_legend(axes)
    return figure


def draw_lengths(history: Sequence[Metrics]) -> Figure:
    """Response length: mean and 95th percentile."""
    figure, axes = _new_axes("tokens")
    steps, mean = column(history, "step"), column(history, "response_tokens_mean")
    p95 = column(history, "response_tokens_p95")
    axes.fill_between(steps, mean, p95, color=AMBER, alpha=0.18, linewidth=0)
    _line(axes, steps, mean, AMBER, "mean")
    _line(axes, steps, p95, FAINT, "95th percentile", style="--")
    axes.set_ylim(bottom=0)
    draw_legend(axes)
    return figure


def draw_entropy(history: Sequence[Metrics]) -> Figure:
    """Entropy of the policy, mean over response tokens."""
    figure, axes = _new_axes("nats a token")
    _line(axes, column(history, "step"), column(history, "entropy"), TEAL, "entropy")
    axes.set_ylim(bottom=0)
    return figure


def draw_seconds(history: Sequence[Metrics]) -> Figure:
    """Seconds of each step, stacked by stage; stages that never ran are left out."""
    figure, axes = _new_axes("seconds")
    stack_seconds(axes, history)
    return figure


def draw_first_plan(history: Sequence[Metrics]) -> Figure:
    """Seconds of each step as it ran, and as the first plan would have taken by the calibrated cost model."""
    figure, axes = _new_axes("seconds a step")
    compared = compare_with_first_plan(history)
    steps = column(history, "step")
    _line(axes, steps, _totals(history), BLUE, "as it ran, plan changes included")
    if compared is not None:
        first = np.array([np.nan if seconds is None else seconds for seconds in compared.first_plan_s], dtype=float)
        # A single step between gaps would draw no line.
        _line(axes, steps, first, VERMILION, "on the first plan (predicted)", style="--")
        for start, stop in _gaps(first):
            axes.axvspan(steps[start] - 0.5, steps[stop] + 0.5, color="#eef0f3", zorder=0, linewidth=0)
        if np.isnan(first).any():
            axes.fill_between([], [], color="#dfe3e8", label="the first plan can't run")
        highest = np.nanmax([*_totals(history), *first, 1e-9])
        axes.set_ylim(0, 1.3 * highest)  # room for the legend
    draw_legend(axes, loc="upper left")
    return figure


def render_png(figure: Figure) -> bytes:
    """Return a figure as a PNG file."""
    return _render(figure, "png")


def render_svg(figure: Figure, title: str) -> str:
    """Return a figure as an <svg> element for an HTML page, with its title for those who can't see it."""
    text = _render(figure, "svg").decode()
    label = html.escape(title)
    return text[text.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def stack_seconds(axes: Axes, history: Sequence[Metrics], columns: int = 3) -> None:
    """Draw the seconds of steps on top of each other by stage, with a legend of the stages that ran."""
    steps, width = column(history, "step"), _points_width(len(history))
    stages = [stage for stage in STAGE_COLORS if any(line.get("seconds", {}).get(stage) for line in history)]
    bottom = np.zeros(-(-len(history) // width))
    for stage in stages:
        values = np.array([line.get("seconds", {}).get(stage) or 0.0 for line in history], dtype=float)
        seconds, label = _means(values, width), stage.replace("_", " ")
        if len(history) <= MOST_BARS:
            axes.bar(steps, seconds, 0.84, bottom=bottom, color=STAGE_COLORS[stage], label=label, linewidth=0)
        else:
            edges = np.append(steps[::width], steps[-1] + 1) - 0.5
            axes.stairs(
                bottom + seconds, edges, baseline=bottom, fill=True, color=STAGE_COLORS[stage], label=label, linewidth=0
            )
        bottom += seconds
    axes.margins(x=0.02)
    # Headroom for the legend, which would else lie on the bars.
    axes.set_ylim(0, 1.28 * max(bottom.max(initial=0.0), 1e-9))
    draw_legend(axes, columns=columns)


def style_axes(axes: Axes, unit: str) -> None:
    """Give axes the look of the report: faint grid, no box, the unit at the left."""
    axes.set_ylabel(unit, color=FAINT, fontsize=9)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)


def draw_legend(axes: Axes, columns: int = 2, loc: Literal["best", "upper left"] = "best") -> None:
    """Add a legend where anything has a label."""
    if axes.get_legend_handles_labels()[0]:
        # Opaque: lines that mark plan changes go through it.
        axes.legend(
            fontsize=8.5, labelcolor=INK, ncols=columns, loc=loc, facecolor="white", framealpha=0.9, edgecolor="none"
        ).set_zorder(4)


def column(history: Sequence[Metrics], key: str) -> np.ndarray:
    """Return one number a step; NaN, which plots skip, where a line has none."""
    return np.array([np.nan if line.get(key) is None else line[key] for line in history], dtype=float)


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    # Without the date the same run gives the same file.
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def _new_axes(unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    style_axes(axes, unit)
    axes.set_xlabel("step", color=FAINT, fontsize=9)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    return figure, axes


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str, style: str = "-") -> None:
    # A single step has no line to draw: mark the points of short runs.
    axes.plot(x, y, style, color=color, linewidth=1.8, label=label, marker="o" if len(x) < 12 else "", markersize=3.5)


def _totals(history: Sequence[Metrics]) -> np.ndarray:
    return np.array([line.get("seconds", {}).get("total") or np.nan for line in history], dtype=float)


def _points_width(num_steps: int) -> int:
    """Return how many steps make one point: 1, until there would be too many points."""
    return -(-num_steps // MOST_POINTS)


def _means(values: np.ndarray, width: int) -> np.ndarray:
    """Return the means of groups of `width` values; the last group may be smaller."""
    return np.array([values[i : i + width].mean() for i in range(0, len(values), width)])


def _gaps(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (first, last) of every stretch of NaN."""
    missing = np.flatnonzero(np.isnan(values)).tolist()
    starts = [i for i in missing if i == 0 or not np.isnan(values[i - 1])]
    stops = [i for i in missing if i + 1 == len(values) or not np.isnan(values[i + 1])]
    return list(zip(starts, stops, strict=True))
