"""Artifacts of a run for Prefect's UI: progress, plans, decisions, transitions, staged state, plots. Never read back.

A view never ends the run: what can't be shown is warned of, once for each kind.
"""

import base64
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from nereus.report.decisions import decision_rows
from nereus.report.pictures import draw_run_pngs
from nereus.report.transition import describe_change, describe_outcome
from nereus.transition.memory import format_bytes
from nereus.transition.mermaid import MOST_BOXES, to_mermaid
from nereus.transition.primitives import TransitionGraph
from storage.errors import hide_credentials

logger = logging.getLogger(__name__)

# A table in the UI is read by people.
MOST_DECISIONS = 200

# The UI draws edges in the colour of what they lie on, unless told otherwise.
_MERMAID_EDGES = "  linkStyle default stroke:#7a8aa0\n"


def publish_plan(plan: Mapping[str, Mapping[str, Any]]) -> None:
    """Show where each model-stage runs; `plan` = {model-stage: {dp, tp, pp, devices, micro_batch, recompute}}."""
    rows = [{"model-stage": name, **{key: str(value) for key, value in entry.items()}} for name, entry in plan.items()]
    with _as_a_view("plan"):
        create_table_artifact(rows, key="plan", description="Replicas (dp), layout (tp x pp) and devices")


def publish_transition(
    step: int, graph: TransitionGraph, seconds: Mapping[str, float], line: Mapping[str, Any] | None = None
) -> None:
    """Show the graph of a change of the plan before it begins, and again when it has ended.

    Args:
        seconds: by primitive, expected or, with `line`, measured.
        line: its line of transitions.jsonl.
    """
    with _as_a_view("transition"):
        changes, state = describe_change(graph.current.to_record(), graph.target.to_record()), "planned"
        if line is not None:
            state = describe_outcome(line)
        chart = f"```mermaid\n{to_mermaid(graph, seconds)}{_MERMAID_EDGES}```"
        text = f"Before step {step}: {changes}\n\n{state}\n\n{chart}\n\n{_primitives_table(graph, seconds)}"
        create_markdown_artifact(text, key="transition", description=f"Plan change before step {step}: {state}")


def _primitives_table(graph: TransitionGraph, seconds: Mapping[str, float]) -> str:
    """Return the first primitives of a graph as a table, which the UI without Mermaid shows too."""
    rows = ["| primitive | waits for | moves | seconds |", "|---|---|---|---|"]
    for part in graph.primitives[:MOST_BOXES]:
        moves = f"{format_bytes(part.bytes)} {part.transport}" if part.bytes else ""
        known = f"{seconds[part.id]:.3g}" if part.id in seconds else ""
        waits_for = ", ".join([*part.depends_on, *(["the commit"] if part.after_commit else [])])
        rows.append(f"| {part.id} | {waits_for} | {moves} | {known} |")
    more = len(graph.primitives) - MOST_BOXES
    return "\n".join(rows) + (f"\n\nand {more} more\n" if more > 0 else "\n")


class ProgressArtifact:
    """How far a run is, in words; written at most once a second, so that short steps don't wait for it."""

    MIN_INTERVAL_S = 1.0

    def __init__(self, steps: range):
        """Show that nothing of `steps` is done, but all before them."""
        self._num_steps = steps.stop
        self._id: Any = None  # None: it could not be made
        self._warned: set[str] = set()
        with _as_a_view("progress", self._warned):
            text = f"{steps.start} of {self._num_steps} steps"
            done = 100.0 * steps.start / self._num_steps
            self._id = create_progress_artifact(done, key="progress", description=text)
        self._written_s = time.monotonic()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show that `step` has ended, with its reward and response length; the last step is always shown."""
        is_last = step + 1 == self._num_steps
        if self._id is None or (not is_last and time.monotonic() - self._written_s < self.MIN_INTERVAL_S):
            return
        with _as_a_view("progress", self._warned):
            reward, length = metrics.get("reward_mean", 0.0), metrics.get("response_tokens_mean", 0.0)
            text = f"{step + 1} of {self._num_steps} steps; reward {reward:.3f}, {length:.1f} tokens a response"
            update_progress_artifact(self._id, progress=100.0 * (step + 1) / self._num_steps, description=text)
        self._written_s = time.monotonic()


class StateArtifact:
    """Where the newest staged state lies, and how to go on from it."""

    MIN_INTERVAL_S = 30.0

    def __init__(self, run_dir: str):
        self._run_dir = hide_credentials(run_dir)
        self._warned: set[str] = set()
        self._shown: int | None = None
        self._written_s = -math.inf

    def update(self, state: Mapping[str, Any] | None, *, is_last: bool = False) -> None:
        """Show the newest commit, `state` = {"step", "url"}, unless one was shown a moment ago."""
        if state is None or state["step"] == self._shown:
            return
        if not is_last and time.monotonic() - self._written_s < self.MIN_INTERVAL_S:
            return
        with _as_a_view("staged state", self._warned):
            url, step = hide_credentials(state["url"]), state["step"]
            text = f"State at the end of step {step}:\n\n`{url}`\n\nGo on from it with `nereus resume {self._run_dir}`."
            create_markdown_artifact(text, key="staged-state", description=f"Newest commit: step {step}")
        self._shown, self._written_s = state["step"], time.monotonic()


def publish_decisions(decisions: Sequence[Mapping[str, Any]], transitions: Sequence[Mapping[str, Any]] = ()) -> None:
    """Show the decisions of a run as a table: what was weighed, predicted and, once known, measured, and why.

    Args:
        decisions: lines of decisions.jsonl; the newest are shown where there are many.
        transitions: lines of transitions.jsonl, which say how long moves really took.
    """
    with _as_a_view("decisions"):
        rows = decision_rows(decisions[-MOST_DECISIONS:], transitions)
        verdicts = Counter(str(record["verdict"]) for record in decisions)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        text = f"Decisions: {counts or 'none yet'}; in brackets how far what was measured is from what was predicted"
        create_table_artifact(rows, key="decisions", description=text)


def publish_plots(
    history: Sequence[dict[str, Any]],
    decisions: Sequence[Mapping[str, Any]] = (),
    transitions: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Show the report's pictures of a run's records, as one markdown page (inline SVG is dropped by the UI)."""
    with _as_a_view("plots"):
        pages = [
            f"## {title}\n\n![{title}](data:image/png;base64,{base64.b64encode(png).decode()})"
            for title, png in draw_run_pngs(history, decisions, transitions)
        ]
        text = "Plans, devices and seconds by step; reward, length and KL"
        create_markdown_artifact("\n\n".join(pages), key="plots", description=text)


@contextmanager
def _as_a_view(what: str, warned: set[str] | None = None) -> Iterator[None]:
    """Turn an error into a warning, unless `warned` says that there was one."""
    try:
        yield
    except Exception as error:  # Prefect's signals of cancellation are no Exceptions
        if warned is not None and what in warned:
            return
        if warned is not None:
            warned.add(what)
        kind = type(error).__name__
        logger.warning("The %s can't be shown in Prefect (%s: %s); the run goes on.", what, kind, error)
