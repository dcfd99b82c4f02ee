"""RUN_DIR/report.html: one file with everything in it, no script and nothing from outside.

It is read from top to bottom: what came of the run, what happened, on which plans, whether it learned, what it cost.
"""

import html
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

from nereus.report.pictures import Picture, draw_pictures
from nereus.report.plans import compare_with_first_plan, describe_first_plan
from nereus.report.story import group_warnings, summarize_in_words, tell_story
from nereus.report.summary import summarize
from nereus.report.tables import badge, changes_table, decisions_table, plan_table, plans_table, steps_table
from storage.errors import hide_credentials
from storage.records import read_records
from storage.small_files import file_exists, read_file, replace_file
from storage.writable import describe_access

Record = Mapping[str, Any]

_STORY_NOTE = (
    "Plans are written dp x tp x pp on devices: replicas, ranks that share every layer, and groups of layers one after "
    "the other. In brackets: how far what was measured is from what was predicted."
)


def write_report(run_dir: str) -> str:
    """Write the report of a run directory (any fsspec URL) and return its path.

    Raises:
        ValueError: the directory holds no run, or can't be read or written; one sentence with the mend.
    """
    run_dir = run_dir.rstrip("/")
    path = f"{run_dir}/report.html"
    doing = "read"
    try:
        config, history = _read_config(run_dir), read_metrics(run_dir)
        transitions, decisions = (read_records(f"{run_dir}/{name}.jsonl") for name in ("transitions", "decisions"))
        page = render_report(run_dir.rsplit("/", 1)[-1], config, history, transitions, decisions)
        doing = "written to"
        replace_file(path, page.encode())
    except ValueError:
        raise
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"RUN_DIR {hide_credentials(run_dir)} can't be {doing} {describe_access(error)}.") from error
    return path


def read_metrics(run_dir: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl by step; none for a run whose first step has not ended."""
    return read_records(f"{run_dir.rstrip('/')}/metrics.jsonl")


def render_report(
    name: str,
    config: Record,
    history: Sequence[dict[str, Any]],
    transitions: Sequence[Record] = (),
    decisions: Sequence[Record] = (),
) -> str:
    """Return the page for a run's name, resolved config, and lines of metrics, transitions and decisions."""
    sections = [
        *(_story_sections(history, transitions, decisions) if history else ["<p>No step has ended yet.</p>"]),
        "<h2>Config</h2>",
        f"<details><summary>run.yaml, every key</summary><pre>{_config_text(config)}</pre></details>",
    ]
    lead = f"PPO run by Nereus: {summarize_in_words(history, transitions)}" if history else "PPO run by Nereus"
    style = resources.files("nereus.report").joinpath("style.css").read_text()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><main><header><h1>{html.escape(name)}</h1><p>{html.escape(lead)}</p></header>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _story_sections(
    history: Sequence[dict[str, Any]], transitions: Sequence[Record], decisions: Sequence[Record]
) -> list[str]:
    pictures = list(draw_pictures(history, decisions, transitions))
    compared = compare_with_first_plan(history)
    return [
        _cards(summarize(history)),
        _warnings(history),
        "<h2>What happened</h2>" + _story(history, transitions, decisions),
        "<h2>Plans, devices and seconds</h2>" + _figures(pictures, "plans"),
        "<h2>What was learned</h2>" + _figures(pictures, "learning"),
        "<h2>What the plans took</h2>" + plans_table(history),
        f"<p>{html.escape(describe_first_plan(compared))}</p>{_figures(pictures, 'cost')}" if compared else "",
        f"<h2>Decisions</h2>{decisions_table(decisions, transitions)}" if decisions else "",
        f"<h2>Plan changes</h2>{changes_table(decisions, transitions)}" if transitions else "",
        f"<h2>Plan</h2><p class=note>In force at the end.</p>{plan_table(history[-1].get('plan', {}))}",
        f"<h2>Steps</h2>{steps_table(history)}",
    ]


def _read_config(run_dir: str) -> dict[str, Any]:
    path = f"{run_dir}/run.yaml"
    if not file_exists(path):
        where = hide_credentials(run_dir)
        raise ValueError(f"{where} holds no run (there is no run.yaml in it); give the directory of a run.")
    return yaml.safe_load(read_file(path)) or {}


def _config_text(config: Record) -> str:
    return html.escape(yaml.safe_dump(dict(config), sort_keys=False))


def _cards(summary: Record) -> str:
    moves = f"means of the first and last {summary['window']} steps"
    cards = [
        ("Reward", f"{summary['reward_first']:.3f} → {summary['reward_last']:.3f}", moves),
        (
            "Response length",
            f"{summary['response_tokens_first']:.1f} → {summary['response_tokens_last']:.1f}",
            f"tokens, {moves}",
        ),
        ("KL to the reference", f"{summary['kl_k1_last']:.4f}", "nats a token, at the end"),
        ("Steps", f"{summary['steps']}", f"{summary['skipped_updates']} updates skipped"),
        ("Time", f"{summary['seconds']:.1f} s", f"{summary['seconds'] / summary['steps']:.2f} s a step"),
        ("Tokens", f"{summary['rollout_tokens']:,}", f"{summary['tokens_per_s']:,.0f} a second"),
    ]
    return (
        "<section class=cards>"
        + "".join(
            f"<div><h3>{html.escape(title)}</h3><strong>{html.escape(value)}</strong><p>{html.escape(note)}</p></div>"
            for title, value, note in cards
        )
        + "</section>"
    )


def _warnings(history: Sequence[Record]) -> str:
    """Return the training alarms, each once with the number of steps that gave it."""
    found = group_warnings(history)
    if not found:
        return ""
    items = "".join(
        f"<li><b>Step {steps[0]}{f' and {len(steps) - 1} more' if steps[1:] else ''}:</b> {html.escape(text)}</li>"
        for steps, text in found
    )
    return f"<aside class=warnings><h3>Look at this</h3><ul>{items}</ul></aside>"


def _story(history: Sequence[Record], transitions: Sequence[Record], decisions: Sequence[Record]) -> str:
    entries, left_out = tell_story(history, decisions, transitions)
    items = "".join(
        f"<li><span class=at>step {entry.step}</span>{badge(entry.kind)}<span>{html.escape(entry.text)}"
        + (f"<small>{html.escape(entry.detail)}</small>" if entry.detail else "")
        + "</span></li>"
        for entry in entries
    )
    more = f"<p class=note>{left_out} more that mattered less are left out.</p>" if left_out else ""
    return f"<p class=note>{_STORY_NOTE}</p><ol class=story>{items}</ol>{more}"


def _figures(pictures: Sequence[Picture], about: str) -> str:
    figures = "".join(
        f"<figure><figcaption>{html.escape(picture.title)}<small>{html.escape(picture.note)}</small></figcaption>"
        f"{picture.to_svg()}</figure>"
        for picture in pictures
        if picture.about == about
    )
    return f"<section class='plots {about}'>{figures}</section>" if figures else ""
