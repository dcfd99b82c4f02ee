"""Policies side by side, for people: a table in the terminal, and the same in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from nereus.simulator.compare import Comparison
from nereus.simulator.result import PolicyRun, saving

HEADINGS = (
    "policy", "steps", "mean step_s", "below fixed", "moves", "of layout", "moves_s", "share", "gap to_best",
    "regret", "OOM",
)  # fmt: skip


def table_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return a row of cells for each policy, in the order of HEADINGS."""
    return [_row(run, comparison) for run in comparison.runs]


def _row(run: PolicyRun, comparison: Comparison) -> tuple[str, ...]:
    record = run.to_record(comparison.get("oracle"))
    fixed = comparison.get("fixed")
    total = comparison.world.scenario.steps
    below = saving(run, fixed) if fixed is not None and fixed is not run and fixed.steps and run.steps else None
    return (
        run.policy,
        str(run.steps) if run.steps == total else f"{run.steps} of {total}",
        _number(record["mean_step_s"], "{:.1f}"),
        _number(below, "{:.1%}"),
        str(record["transitions"]),
        str(record["layout_transitions"]),
        _number(record["transition_s"], "{:.1f}"),
        _number(record["transition_share"], "{:.3%}"),
        _number(record["mean_gap_to_best_plan"], "{:.1%}"),
        _number(record["regret_to_oracle"], "{:.1%}"),
        str(record["oom_steps"]),
    )


def _number(number: float | None, style: str) -> str:
    return "" if number is None else style.format(number)


def build_table(comparison: Comparison, title: str) -> Table:
    """Return the table for a terminal."""
    table = Table(title=title, title_justify="left", caption=f"devices: {comparison.world.traces.source}",
                  caption_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)  # fmt: skip
    for index, heading in enumerate(HEADINGS):
        # Headings on two lines, so that the table fits 80 columns.
        table.add_column(
            heading.replace(" ", "\n").replace("_", " "), justify="left" if index == 0 else "right", no_wrap=True
        )
    for row in table_rows(comparison):
        table.add_row(*row)
    return table


def build_markdown(rows: Sequence[Sequence[str]], headings: Sequence[str] = HEADINGS) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(headings).replace("_", " ") + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
