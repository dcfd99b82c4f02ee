"""One picture of a simulation: step latency by policy; devices, response length and plan changes under it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nereus.report.plots import AMBER, BLUE, FAINT, GRID, INK, TEAL, VIOLET

POLICY_COLORS = {"payback": BLUE, "any_gain": AMBER, "every_k": TEAL, "fixed": FAINT, "oracle": VIOLET}


def draw_simulation(
    title: str,
    latencies_s: Mapping[str, Sequence[float]],
    devices: Sequence[int],
    response_tokens: Sequence[float],
    changes: Mapping[str, Sequence[tuple[int, bool]]],
) -> Figure:
    """Return the picture of a scenario.

    Args:
        latencies_s: by policy the seconds of each step it survived, transitions included.
        changes: by policy (step, whether tp or pp changed) of every plan change.
    """
    figure = Figure(figsize=(8.0, 7.0), layout="constrained")
    rows = figure.subplots(4, 1, sharex=True, height_ratios=[4, 1.3, 1.3, 0.5 + 0.28 * len(changes)])
    latency, pool, length, moves = rows
    latency.set_title(title, color=INK, fontsize=11, loc="left")
    for policy, seconds in latencies_s.items():
        style = "--" if policy == "oracle" else "-"
        color = POLICY_COLORS.get(policy, INK)
        latency.plot(range(len(seconds)), seconds, style, color=color, linewidth=1.6, label=policy)
    latency.set_ylim(bottom=0)
    latency.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=5, loc="upper left")
    pool.step(range(len(devices)), devices, where="mid", color=INK, linewidth=1.4)
    pool.set_ylim(bottom=0)
    length.plot(range(len(response_tokens)), response_tokens, color=AMBER, linewidth=1.4)
    length.set_ylim(bottom=0)
    _draw_changes(moves, changes)
    for axes, unit in zip(rows, ("seconds a step", "devices", "tokens", "moves"), strict=True):
        _style(axes, unit)
    moves.set_xlabel("step", color=FAINT, fontsize=9)
    moves.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    return figure


def render(figure: Figure, kind: str) -> bytes:
    """Return the picture as a file of some kind, such as "png" or "svg"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=150)
    return buffer.getvalue()


def _draw_changes(axes: Axes, changes: Mapping[str, Sequence[tuple[int, bool]]]) -> None:
    """Draw a tick for every plan change, a dot for one of tp or pp."""
    for row, (policy, steps) in enumerate(changes.items()):
        color = POLICY_COLORS.get(policy, INK)
        for is_layout, marker in ((False, "|"), (True, "o")):
            at = [step for step, changes_layout in steps if changes_layout == is_layout]
            axes.plot(at, [row] * len(at), marker, color=color, markersize=4 if is_layout else 6)
    axes.set_yticks(range(len(changes)), list(changes))
    axes.set_ylim(-0.6, len(changes) - 0.4)
    axes.invert_yaxis()


def _style(axes: Axes, unit: str) -> None:
    axes.set_ylabel(unit, color=FAINT, fontsize=9)
    axes.tick_params(colors=FAINT, labelsize=8.5, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
