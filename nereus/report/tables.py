"""The tables of the report as HTML: plans, decisions, changes of the plan, steps. Long ones are cut to what is read."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nereus.report.decisions import MOVES, VERDICTS, decision_rows, describe_places, format_s, match_moves
from nereus.report.plans import describe_ranges, split_by_plan
from nereus.report.transition import describe_outcome

Record = Mapping[str, Any]

MOST_DECISIONS, MOST_CHANGES, MOST_STEPS, MOST_PLANS = 100, 200, 400, 30
# Columns of the table of steps: key of the metrics line, heading, format.
_STEP_COLUMNS = (
    ("step", "step", "d"),
    ("policy_version", "policy version", "d"),
    ("reward_mean", "reward", ".4f"),
    ("kl_k1", "KL (k1)", ".5f"),
    ("response_tokens_mean", "length", ".1f"),
    ("response_tokens_p95", "length p95", ".1f"),
    ("share_at_cap", "at the cap", ".0%"),
    ("entropy", "entropy", ".3f"),
    ("clip_fraction", "clipped", ".2%"),
    ("value_loss", "value loss", ".5f"),
    ("explained_variance", "explained variance", ".3f"),
    ("first_ratio_max_error", "first ratio error", ".1e"),
)
_DECISION_COLUMNS = (
    "before step", "trigger", "verdict", "step now", "candidate's", "measured", "move", "measured move", "payback"
)  # fmt: skip


def badge(kind: str) -> str:
    """Return a verdict or kind of entry as a small label; its colour repeats what it says."""
    return f"<span class='badge {html.escape(kind)}'>{html.escape(kind)}</span>"


def plan_table(plan: Mapping[str, Record]) -> str:
    """The plan in force at the end, model-stage by model-stage."""
    keys = ("dp", "tp", "pp", "devices", "micro_batch", "recompute")
    rows = (
        [name, *(", ".join(map(str, e[k])) if isinstance(e.get(k), list) else str(e.get(k, "")) for k in keys)]
        for name, e in plan.items()
    )
    return table(["model-stage", "dp", "tp", "pp", "devices", "micro-batch", "recompute"], rows)


def plans_table(history: Sequence[Record]) -> str:
    """Every plan with what its steps took and what was predicted of them; the longest-lived where there are many."""
    plans = split_by_plan(history)
    shown = sorted(plans, key=lambda plan: -len(plan.steps))[:MOST_PLANS]
    rows = [
        [
            plan.plan,
            describe_ranges(plan.steps),
            str(len(plan.steps)),
            format_s(plan.mean_predicted_s),
            format_s(plan.mean_s),
            "" if plan.error is None else f"{plan.error:.0%}",
        ]
        for plan in plans
        if plan in shown
    ]
    headings = ["plan (dp x tp x pp on devices)", "steps", "number", "predicted", "measured", "mean error"]
    return table(headings, rows, kind="wide") + _cut(len(plans), len(shown), "plans", "metrics.jsonl")


def decisions_table(decisions: Sequence[Record], transitions: Sequence[Record]) -> str:
    """Two rows a decision, its numbers and its reason; where there are many, those that moved and the newest."""
    moved = [i for i, record in enumerate(decisions) if record["verdict"] in MOVES][-MOST_DECISIONS:]
    others = [i for i, record in enumerate(decisions) if record["verdict"] not in MOVES]
    room = MOST_DECISIONS - len(moved)
    shown = sorted(moved + (others[-room:] if room else []))
    rows = decision_rows([decisions[i] for i in shown], transitions)
    head = "".join(f"<th>{html.escape(name)}</th>" for name in _DECISION_COLUMNS)
    body = "".join(_decision(row) for row in rows)
    words = "; ".join(f"{badge(kind)} {html.escape(text)}" for kind, text in VERDICTS.items())
    return (
        f"<p class=note>{words}. <b>Step now</b> and <b>candidate's</b>: predicted seconds of a step on the plan in "
        "force and on the one weighed against it. <b>Measured</b>: the next step as it ran, and how far that is from "
        "what was predicted of its plan. <b>Payback</b>: steps until the move has earned its seconds, of those until "
        f"the next change is expected.</p><div class=scroll><table class=decisions><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>" + _cut(len(decisions), len(shown), "decisions", "decisions.jsonl")
    )


def changes_table(decisions: Sequence[Record], transitions: Sequence[Record]) -> str:
    """Every change of the plan, numbered as in the picture; the newest where there are many."""
    moves = list(enumerate(match_moves(decisions, transitions), start=1))
    rows = []
    for number, move in moves[-MOST_CHANGES:]:
        kind = "retry" if move.is_retry and move.kind != "undone" else move.kind
        change = describe_places(move.line["from"], move.line["to"]) or "nothing"
        rows.append([str(number), str(move.step), change, describe_outcome(move.line), kind])
    headings = ["number", "before step", "dp x tp x pp on devices", "moved", "kind"]
    content = table(headings, rows, kind="changes", badges=True)
    return content + _cut(len(moves), len(rows), "changes", "transitions.jsonl")


def steps_table(history: Sequence[Record]) -> str:
    """All steps, folded away; of very many every so many-th, and the last."""
    every = -(-len(history) // MOST_STEPS)
    lines = [line for i, line in enumerate(history) if i % every == 0 or i + 1 == len(history)]
    present = [column for column in _STEP_COLUMNS if any(line.get(column[0]) is not None for line in lines)]
    rows = (
        ["" if line.get(key) is None else format(line[key], spec) for key, _, spec in present]
        + [f"{line.get('seconds', {}).get('total', float('nan')):.2f}"]
        for line in lines
    )
    content = table([heading for _, heading, _ in present] + ["seconds"], rows)
    which = f", one in {every} shown" if every > 1 else ""
    return f"<details><summary>{len(history)} steps{which}</summary>{content}</details>"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, kind: str = "plain", badges: bool = False) -> str:
    """Return a table of text cells; with `badges` the last column is one of kinds."""
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    body = ""
    for row in rows:
        cells = [f"<td>{html.escape(cell)}</td>" for cell in (row[:-1] if badges else row)]
        body += f"<tr>{''.join(cells)}{f'<td>{badge(row[-1])}</td>' if badges else ''}</tr>"
    return f"<div class=scroll><table class={kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _decision(row: Mapping[str, str]) -> str:
    cells = "".join(
        f"<td>{badge(row[name]) if name == 'verdict' else html.escape(row[name])}</td>" for name in _DECISION_COLUMNS
    )
    why = html.escape(row["reason"]) + ("" if row["verdict"] == "keep" else f"<br>{html.escape(row['candidate'])}")
    reason = f"<td></td><td class=reason colspan={len(_DECISION_COLUMNS) - 1}>{why}</td>"
    return f"<tr>{cells}</tr><tr class=why>{reason}</tr>"


def _cut(total: int, shown: int, what: str, file: str) -> str:
    return f"<p class=note>{shown} of {total} {what} are shown; all are in {file}.</p>" if shown < total else ""
