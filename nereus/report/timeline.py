"""One tall picture of a run: devices, response length, plans and step latency over the steps, changes marked in all.

As everywhere in the report, no meaning is carried by colour alone: what a colour says is written beside or in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from nereus.report.decisions import Move, match_moves
from nereus.report.plans import describe_ids, devices_of
from nereus.report.plots import BLUE, FAINT, INK, VERMILION, column, draw_legend, stack_seconds, style_axes

Record = Mapping[str, Any]

# Light enough for dark text on them, and apart from each other for every kind of colour vision (Okabe and Ito's, lit).
LAYOUT_FILLS = ("#cfe3f3", "#fbe0b3", "#bfe8da", "#f6cfe3", "#f9cdb8", "#d8d4f2", "#f7f2b0", "#e2e2e2")
LAYOUT_EDGES = ("#0072b2", "#b87700", "#00805d", "#b0578a", "#b34a00", "#5b4fb0", "#8a8200", "#555555")
# How a change of the plan is marked: colour, line and sign. An undone one leaves the old plan in force.
MARKS = {
    "urgent": (VERMILION, "-", "urgent"),
    "admit": ("#00805d", "-", "pays back"),
    "scheduled": (INK, "-", "scheduled"),
    "rebuilt": (INK, "--", "built again"),
    "undone": (FAINT, ":", "undone"),
}
# Beyond so many changes their numbers would lie on each other.
_MOST_NUMBERS = 24
_WIDTH_IN, _POINTS_A_LETTER = 11.0, 4.3


def draw_timeline(
    history: Sequence[dict[str, Any]], decisions: Sequence[Record] = (), transitions: Sequence[Record] = ()
) -> Figure:
    """Return the picture of a run's lines of metrics.jsonl, decisions.jsonl and transitions.jsonl (at least a step)."""
    stages = list(dict.fromkeys(name for line in history for name in line.get("plan", {})))
    ratios = [1.0, 1.5, 0.42 * max(1, len(stages)) + 0.25, 2.6]
    figure = Figure(figsize=(_WIDTH_IN, 1.0 + sum(ratios)), layout="constrained")
    rows = figure.subplots(4, 1, sharex=True, height_ratios=ratios)
    pool, length, plans, latency = rows
    _draw_devices(pool, history)
    _draw_lengths(length, history)
    layouts = _draw_plans(plans, history, stages)
    stack_seconds(latency, history, columns=7)
    for axes, unit in zip(rows, ("devices", "tokens", "", "seconds a step"), strict=True):
        style_axes(axes, unit)
    plans.grid(visible=False)
    moves = match_moves(decisions, transitions)
    for axes in rows:
        _mark(axes, moves)
    _number(pool, moves)
    first, last = history[0]["step"], history[-1]["step"]
    latency.set_xlim(first - 0.5, last + 0.5)
    latency.set_xlabel("step", color=FAINT, fontsize=9)
    latency.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14))
    _explain(figure, plans, layouts, moves)
    return figure


def layout_text(layout: tuple[int, int]) -> str:
    """Return a layout in words."""
    return f"tp {layout[0]} · pp {layout[1]}"


def _draw_devices(axes: Axes, history: Sequence[Record]) -> None:
    """Draw how many devices are there, and how many of them the plan uses."""
    edges = _edges(history)
    there = [len(line.get("devices_present") or devices_of(line.get("plan", {}))) for line in history]
    used = [len(devices_of(line.get("plan", {}))) for line in history]
    axes.stairs(there, edges, fill=True, color="#dbe4ee", label="there")
    axes.stairs(used, edges, color=BLUE, linewidth=1.8, label="used by the plan", baseline=None)
    axes.set_ylim(0, 1.5 * max(1, *there))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
    draw_legend(axes, columns=2, loc="upper left")


def _draw_lengths(axes: Axes, history: Sequence[dict[str, Any]]) -> None:
    steps, mean, p95 = (column(history, key) for key in ("step", "response_tokens_mean", "response_tokens_p95"))
    axes.fill_between(steps, mean, p95, color="#e69f00", alpha=0.18, linewidth=0, label="to the 95th percentile")
    axes.plot(steps, mean, color="#b87700", linewidth=1.8, label="mean response", marker="o" if len(steps) == 1 else "")
    axes.set_ylim(bottom=0)
    draw_legend(axes, columns=2, loc="upper left")


def _draw_plans(axes: Axes, history: Sequence[Record], stages: Sequence[str]) -> list[tuple[int, int]]:
    """Draw a row of boxes for each model-stage; return the layouts in the order of their colours."""
    entries = [line.get("plan", {}) for line in history]
    layouts = sorted({(e["tp"], e["pp"]) for plan in entries for e in plan.values()})
    points_a_step = 72 * 0.86 * _WIDTH_IN / max(1, len(history))
    for row, name in enumerate(stages):
        boxes: dict[int, list[tuple[float, float]]] = {}
        for start, stop, entry in _stretches(history, name):
            color = layouts.index((entry["tp"], entry["pp"])) % len(LAYOUT_FILLS)
            boxes.setdefault(color, []).append((start, stop - start))
            text = _fitting_text(entry, points_a_step * (stop - start))
            if text:
                back = {"facecolor": LAYOUT_FILLS[color], "edgecolor": "none", "pad": 1.0}
                axes.text((start + stop) / 2, row, text, ha="center", va="center", fontsize=7.5, color=INK,
                          clip_on=True, zorder=4, bbox=back)  # fmt: skip
        for color, spans in boxes.items():
            fill, edge = LAYOUT_FILLS[color], LAYOUT_EDGES[color]
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolor=fill, edgecolor=edge, linewidth=0.9)
    axes.set_yticks(range(len(stages)), list(stages))
    axes.set_ylim(max(1, len(stages)) - 0.45, -0.55)
    return layouts


def _stretches(history: Sequence[Record], name: str) -> list[tuple[float, float, Record]]:
    """Return (start, stop, plan entry) of the stretches of steps in which a model-stage lay at the same place."""
    found: list[tuple[float, float, Record]] = []
    for line in history:
        entry, step = line.get("plan", {}).get(name), line["step"]
        if entry is None:
            continue
        if found and found[-1][1] == step - 0.5 and _place(found[-1][2]) == _place(entry):
            found[-1] = (found[-1][0], step + 0.5, entry)
        else:
            found.append((step - 0.5, step + 0.5, entry))
    return found


def _fitting_text(entry: Record, points: float) -> str:
    """Return as much of dp x tp x pp and devices as a box of a width has room for."""
    short = f"{entry['dp']}×{entry['tp']}×{entry['pp']}"
    for text in (f"{short} on {describe_ids(entry.get('devices', ()))}", short):
        if len(text) * _POINTS_A_LETTER < points:
            return text
    return ""


def _mark(axes: Axes, moves: Sequence[Move]) -> None:
    for kind, (color, style, _) in MARKS.items():
        steps = [move.step - 0.5 for move in moves if move.kind == kind]
        axes.vlines(
            steps, 0, 1, color=color, linestyle=style, linewidth=1.3, zorder=3, transform=axes.get_xaxis_transform()
        )


def _number(axes: Axes, moves: Sequence[Move]) -> None:
    """Write the number of each change over its line, as the story and the tables have it."""
    if len(moves) > _MOST_NUMBERS:
        return
    for number, move in enumerate(moves, start=1):
        axes.annotate(
            str(number), (move.step - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=8, color=MARKS[move.kind][0], fontweight="bold",
        )  # fmt: skip


def _explain(figure: Figure, axes: Axes, layouts: Sequence[tuple[int, int]], moves: Sequence[Move]) -> None:
    """Write what the colours of boxes and lines mean under the picture."""
    handles: list[Any] = [
        Patch(facecolor=LAYOUT_FILLS[i % 8], edgecolor=LAYOUT_EDGES[i % 8], label=layout_text(layout))
        for i, layout in enumerate(layouts)
    ]
    for kind in dict.fromkeys(move.kind for move in moves):
        color, style, words = MARKS[kind]
        handles += axes.plot([], [], color=color, linestyle=style, linewidth=1.6, label=f"plan change: {words}")
    if handles:
        figure.legend(
            handles=handles, loc="outside lower center", ncols=min(6, len(handles)), frameon=False, fontsize=8.5,
            labelcolor=INK,
        )  # fmt: skip


def _edges(history: Sequence[Record]) -> np.ndarray:
    steps = [line["step"] for line in history]
    return np.array([*(step - 0.5 for step in steps), steps[-1] + 0.5])


def _place(entry: Record) -> tuple[Any, ...]:
    return (entry["dp"], entry["tp"], entry["pp"], *entry.get("devices", ()))
