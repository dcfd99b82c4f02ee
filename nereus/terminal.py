"""How a run looks in the terminal: one row a step, with a live line below where the output is a terminal."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nereus.plan import Plan, places_of
from nereus.progress import Event
from nereus.report.decisions import describe_decision, format_s
from nereus.report.plans import split_by_plan
from nereus.report.story import transition_share
from nereus.report.transition import describe_change, describe_outcome, describe_settings

_HEADINGS = ("step", "reward", "KL/token", "length", "p95", "tokens/s", "seconds")
_WIDTHS = (7, 8, 9, 8, 7, 9, 8)


class RunView:
    """A listener for `nereus.progress.watch`; a context manager that cleans its live line up."""

    def __init__(self, console: Console):
        self.run_dir: str | None = None  # of the run that has been opened
        self._console = console
        self._plan: Mapping[str, Any] = {}
        self._first_step = 0
        self._live = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar = self._live.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        """Show one event."""
        if event.kind == "opened":
            self.run_dir = event.data["run_dir"]
            first = self._first_step = event.data.get("first_step", 0)
            goes_on = f", goes on at step {first}" if first and event.data["steps"] else ""
            self._console.print(f"run   {self.run_dir}{goes_on}", highlight=False, soft_wrap=True)
            self._show_plan(event.data["plan"])
            if event.data["steps"]:
                self._console.print(_row(_HEADINGS), style="bold", highlight=False)
            else:
                self._console.print("all steps are done already; `steps=N` makes the run longer", highlight=False)
            self._live.update(self._bar, total=event.data["steps"], description="starting")
        elif event.kind == "stage":
            self._live.update(self._bar, description=f"step {event.step} · {event.data['stage']}")
        elif event.kind == "decision":
            if event.data["verdict"] != "keep":  # those that change nothing are in the report
                self._print("adapt", describe_decision(event.data))
        elif event.kind == "transition":
            self._show_transition(event.data)
        else:
            self._show_change(event.data.get("plan", self._plan))
            self._console.print(_row(_format_step(event.data)), highlight=False)
            for warning in event.data.get("warnings") or ():
                self._print("warn", warning, style="yellow")
            # Not one more: a failed change of the plan may have set the run back.
            self._live.update(self._bar, completed=event.data["step"] + 1 - self._first_step)

    def _show_transition(self, line: Mapping[str, Any]) -> None:
        self._print("plan", f"{describe_change(line['from'], line['to'])}: {describe_outcome(line)}")
        if line["outcome"] == "committed":
            self._plan = line["to"]

    def _show_plan(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        for index, part in enumerate(Plan.from_record(plan).describe().split("; ")):
            self._console.print(f"{'plan' if index == 0 else '':5} {part}", highlight=False)

    def _show_change(self, plan: Mapping[str, Any]) -> None:
        """Show a plan that is another one, or what of its settings is."""
        if places_of(plan) != places_of(self._plan):
            self._show_plan(plan)
        elif plan != self._plan:
            self._print("plan", describe_settings(self._plan, plan))
            self._plan = plan

    def _print(self, label: str, text: str, style: str | None = None) -> None:
        # Square brackets in a reason or a file's name are no markup.
        self._console.print(f"{label:5} {text}", highlight=False, soft_wrap=True, markup=False, style=style)


def show_plans(console: Console, history: Sequence[Mapping[str, Any]]) -> None:
    """Print what the steps of each plan took against what was predicted, and what the changes between them took.

    Args:
        history: lines of metrics.jsonl.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("plan (dp x tp x pp on devices)", overflow="fold")
    for heading in ("steps", "predicted", "measured", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for plan in split_by_plan(history):
        error = "" if plan.error is None else f"{plan.error:.0%}"
        numbers = (str(len(plan.steps)), format_s(plan.mean_predicted_s), format_s(plan.mean_s), error)
        table.add_row(Text(plan.plan), *numbers)
    console.print(table, highlight=False)
    console.print(f"changes of the plan took {transition_share(history):.1%} of the time", highlight=False)


def _format_step(metrics: Mapping[str, Any]) -> tuple[str, ...]:
    seconds = metrics["seconds"]["total"]
    return (
        str(metrics["step"]),
        f"{metrics['reward_mean']:.3f}",
        f"{round(metrics['kl_k1'], 4) + 0.0:.4f}",  # never -0.0000
        f"{metrics['response_tokens_mean']:.1f}",
        f"{metrics['response_tokens_p95']:.0f}",
        f"{metrics['rollout_tokens'] / seconds:,.0f}",
        f"{seconds:.2f}",
    )


def _row(cells: tuple[str, ...]) -> str:
    return "".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
