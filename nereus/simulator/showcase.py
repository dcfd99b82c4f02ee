"""Runs every shipped scenario and keeps the tables in the simulator's README: `python -m nereus.simulator.showcase`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from nereus.simulator.compare import Comparison, simulate
from nereus.simulator.goals import NEEDED, PAPER_TRACES, describe_goals
from nereus.simulator.load import list_scenarios, load_scenario
from nereus.simulator.result import PolicyRun, saving
from nereus.simulator.run import run_policy
from nereus.simulator.table import build_markdown, table_rows
from nereus.simulator.world import build_world

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- tables begin -->", "<!-- tables end -->"
GOALS, MEANS, GAMMA_SWEEP = "Goals", "The three traces in the mean", "payback on paper-trace-1 by gamma"
GAMMAS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.65, 0.8, 1.0)


def main(names: Sequence[str]) -> None:
    """Run scenarios (all when none is named) and bring their sections of the README up to date."""
    comparisons: dict[str, Comparison] = {}
    for name in names or list_scenarios():
        began = time.monotonic()
        comparisons[name] = simulate(load_scenario(name))
        keep_section(name, describe(comparisons[name]))
        print(f"({time.monotonic() - began:.0f} s)\n", flush=True)
    if set(PAPER_TRACES) <= set(comparisons):
        keep_section(MEANS, describe_traces(comparisons))
        keep_section(GAMMA_SWEEP, describe_gammas())
    if set(NEEDED) <= set(comparisons):
        keep_section(GOALS, describe_goals(comparisons))


def keep_section(title: str, text: str) -> None:
    """Print a section and put it in its place in the README."""
    print(f"### {title}\n\n{text}\n", flush=True)
    before, rest = README.read_text().split(BEGIN)
    tables, after = rest.split(END)
    sections = dict(part.split("\n", 1) for part in tables.split("### ")[1:])
    sections[title] = f"\n{text}\n\n"
    order = [GOALS, *PAPER_TRACES, MEANS, GAMMA_SWEEP, *list_scenarios()]
    ordered = [name for name in dict.fromkeys(order) if name in sections]
    body = "".join(f"### {name}\n\n{sections[name].strip()}\n\n" for name in ordered)
    README.write_text(f"{before}{BEGIN}\n\n{body}{END}{after}")


def describe(comparison: Comparison) -> str:
    """Return what is to be said of one scenario: its table first."""
    lines = [f"Devices: {comparison.world.traces.source}.", ""]
    lines += [build_markdown(table_rows(comparison)), ""]
    static, payback = comparison.best_static, comparison.get("payback")
    if payback is not None and static is not None and payback.steps == comparison.world.scenario.steps:
        share = payback.seconds() / static[1] - 1.0
        lines.append(
            f"The best static plan that survives to the end takes {static[1] / payback.steps:.1f} s a step; payback is "
            f"{abs(share):.1%} {'below' if share < 0 else 'above'} it."
        )
    for run in comparison.runs:
        if run.ended_by:
            lines.append(f"{run.policy} ended: {run.ended_by}")
    warned = next((run for run in comparison.runs if run.warnings), None)
    if warned is not None:
        lines.append(f"Warned from step {warned.warnings[0][0]} on: {warned.warnings[0][1]}")
    return "\n".join(lines).rstrip()


def describe_traces(comparisons: dict[str, Comparison]) -> str:
    """Return the means over the paper's traces."""
    rows = []
    for policy in ("fixed", "every_k", "any_gain", "payback", "oracle"):
        runs = [comparisons[name][policy] for name in PAPER_TRACES]
        savings = [saving(run, comparisons[name]["fixed"]) for run, name in zip(runs, PAPER_TRACES, strict=True)]
        regrets = [run.regret(comparisons[name]["oracle"]) for run, name in zip(runs, PAPER_TRACES, strict=True)]
        rows.append((policy, *_means(runs), f"{mean(savings):.1%}", f"{mean(r or 0.0 for r in regrets):.1%}"))
    headings = ("policy", "mean step s", "transitions", "transition s", "below fixed", "regret")
    return build_markdown(rows, headings)


def _means(runs: Sequence[PolicyRun]) -> tuple[str, str, str]:
    records = [run.to_record() for run in runs]
    return (
        f"{mean(record['mean_step_s'] for record in records):.1f}",
        f"{mean(record['transitions'] for record in records):.1f}",
        f"{mean(record['transition_s'] for record in records):.1f}",
    )


def describe_gammas() -> str:
    """Return the sweep of gamma over the first trace."""
    rows = []
    for gamma in GAMMAS:
        world = build_world(load_scenario(PAPER_TRACES[0], [f"gamma={gamma}"]))
        record = run_policy(world, "payback").to_record()
        rows.append(
            (
                f"{gamma:g}",
                f"{record['mean_step_s']:.1f}",
                str(record["transitions"]),
                str(record["layout_transitions"]),
                f"{record['transition_s']:.1f}",
            )
        )
    headings = ("gamma", "mean step s", "transitions", "of layout", "transition s")
    return build_markdown(rows, headings)


if __name__ == "__main__":
    main(sys.argv[1:])
