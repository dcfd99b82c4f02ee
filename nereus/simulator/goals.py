"""What the shipped scenarios are to show, what comes out, and whether that is enough: a table for the README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import mean

from nereus.simulator.compare import Comparison
from nereus.simulator.result import saving
from nereus.simulator.table import build_markdown

PAPER_TRACES = ("paper-trace-1", "paper-trace-2", "paper-trace-3")
# All scenarios that a goal looks at.
NEEDED = (*PAPER_TRACES, "long-run-1024", "monotone-growth", "flapping", "stuck-at-cap")

Row = tuple[str, str, str, str]


def describe_goals(comparisons: Mapping[str, Comparison]) -> str:
    """Return the table of goals; `comparisons` has at least the NEEDED scenarios."""
    rows = [
        *_first_trace(comparisons[PAPER_TRACES[0]]),
        *_traces([comparisons[name] for name in PAPER_TRACES]),
        _memory(comparisons),
        _long_run(comparisons["long-run-1024"]),
        _static("monotone-growth: payback against the best static plan", comparisons["monotone-growth"], 0.0),
        _static("flapping: payback against the best static plan", comparisons["flapping"], 0.02),
        _cap(comparisons["stuck-at-cap"]),
    ]
    return build_markdown(rows, ("what", "goal", "comes out", "met"))


def _row(what: str, goal: str, result: str, met: bool) -> Row:
    return what, goal, result, "yes" if met else "NO"


def _first_trace(comparison: Comparison) -> Iterable[Row]:
    below, oracles = (saving(comparison[name], comparison["fixed"]) for name in ("payback", "oracle"))
    result = f"{below:.1%} (oracle {oracles:.1%})"
    yield _row("paper-trace-1: payback below fixed", "27.7% or more", result, below >= 0.277)


def _traces(comparisons: list[Comparison]) -> Iterable[Row]:
    def mean_step_s(policy: str) -> float:
        return mean(c[policy].seconds() / c[policy].steps for c in comparisons)

    paybacks = mean_step_s("payback")
    for other in ("any_gain", "every_k"):
        theirs = mean_step_s(other)
        what, result = f"three traces: payback's mean step against {other}'s", f"{paybacks:.1f} s, {theirs:.1f} s"
        yield _row(what, "below", result, paybacks < theirs)
    regrets = [c["payback"].regret(c["oracle"]) or 0.0 for c in comparisons]
    result = f"{mean(regrets):.1%} in the mean, {max(regrets):.1%} at most"
    yield _row("three traces: payback's regret to the oracle", "5% or less", result, mean(regrets) <= 0.05)


def _memory(comparisons: Mapping[str, Comparison]) -> Row:
    steps = sum(c["payback"].to_record()["oom_steps"] for c in comparisons.values())
    what = f"all {len(comparisons)} scenarios: payback's steps that ran out of memory"
    return _row(what, "0", str(steps), steps == 0)


def _long_run(comparison: Comparison) -> Row:
    record = comparison["payback"].to_record()
    share = record["layout_transition_s"] / record["total_s"]
    result = f"{share:.3%} in {record['layout_transitions']} moves (all {record['transition_share']:.3%})"
    return _row("long-run-1024: share of layout transitions", "0.079% or less", result, share <= 0.00079)


def _static(what: str, comparison: Comparison, allowed: float) -> Row:
    goal = f"at most {allowed:.0%} above" if allowed else "below"
    if comparison.best_static is None:
        return _row(what, goal, "no static plan survives", True)
    above = comparison["payback"].seconds() / comparison.best_static[1] - 1.0
    result = f"{abs(above):.1%} {'above' if above > 0 else 'below'}"
    return _row(what, goal, result, above < allowed)


def _cap(comparison: Comparison) -> Row:
    warnings = comparison["payback"].warnings
    result = f"from step {warnings[0][0]} on, at {len(warnings)} steps" if warnings else "never"
    return _row("stuck-at-cap: warned of as a training problem", "warned", result, bool(warnings))
