"""RUN_DIR/report.html: one file with everything in it, no script and nothing from outside."""

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

from nereus.report.plots import draw_run_svgs
from nereus.report.summary import summarize
from nereus.report.transition import describe_change, describe_outcome
from storage.errors import hide_credentials
from storage.records import read_records
from storage.small_files import file_exists, read_file, replace_file
from storage.writable import describe_access

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


def write_report(run_dir: str) -> str:
    """Write the report of a run directory (any fsspec URL) and return its path.

    Raises:
        ValueError: the directory holds no run, or can't be read or written; one sentence with the mend.
    """
    run_dir = run_dir.rstrip("/")
    path = f"{run_dir}/report.html"
    doing = "read"
    try:
        transitions = read_records(f"{run_dir}/transitions.jsonl")
        page = render_report(run_dir.rsplit("/", 1)[-1], _read_config(run_dir), read_metrics(run_dir), transitions)
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
    config: Mapping[str, Any],
    history: Sequence[dict[str, Any]],
    transitions: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return the page for a run's name, resolved config, metrics lines and lines of transitions.jsonl."""
    plots = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in draw_run_svgs(history)
    )
    sections = [
        f"<header><h1>{html.escape(name)}</h1><p>PPO run by Nereus</p></header>",
        _cards(summarize(history)) if history else "<p>No step has ended yet.</p>",
        f"<section class=plots>{plots}</section>",
        _plan_table(history[-1].get("plan", {})) if history else "",
        _transitions_table(transitions) if transitions else "",
        _steps_table(history) if history else "",
        "<h2>Config</h2>",
        f"<pre>{html.escape(yaml.safe_dump(dict(config), sort_keys=False))}</pre>",
    ]
    style = resources.files("nereus.report").joinpath("style.css").read_text()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(name)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{style}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _read_config(run_dir: str) -> dict[str, Any]:
    path = f"{run_dir}/run.yaml"
    if not file_exists(path):
        where = hide_credentials(run_dir)
        raise ValueError(f"{where} holds no run (there is no run.yaml in it); give the directory of a run.")
    return yaml.safe_load(read_file(path)) or {}


def _cards(summary: Mapping[str, Any]) -> str:
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


def _plan_table(plan: Mapping[str, Mapping[str, Any]]) -> str:
    keys = ("dp", "tp", "pp", "devices", "micro_batch", "recompute")
    rows = (
        [name, *(", ".join(map(str, e[k])) if isinstance(e.get(k), list) else str(e.get(k, "")) for k in keys)]
        for name, e in plan.items()
    )
    return "<h2>Plan</h2>" + _table(["model-stage", "dp", "tp", "pp", "devices", "micro-batch", "recompute"], rows)


def _transitions_table(transitions: Sequence[Mapping[str, Any]]) -> str:
    rows = (
        [str(line["step"]), describe_change(line["from"], line["to"]), describe_outcome(line)] for line in transitions
    )
    return "<h2>Plan changes</h2>" + _table(["before step", "dp x tp x pp", "moved"], rows)


def _steps_table(history: Sequence[dict[str, Any]]) -> str:
    present = [column for column in _STEP_COLUMNS if any(line.get(column[0]) is not None for line in history)]
    rows = (
        ["" if line.get(key) is None else format(line[key], spec) for key, _, spec in present]
        + [f"{line.get('seconds', {}).get('total', float('nan')):.2f}"]
        for line in history
    )
    table = _table([heading for _, heading, _ in present] + ["seconds"], rows)
    return f"<h2>Steps</h2><details><summary>{len(history)} steps</summary>{table}</details>"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
