"""How a run looks in the terminal: one row a step, with a live line below where the output is a terminal."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from nereus.plan import Plan
from nereus.progress import Event
from nereus.report.transition import describe_change, describe_outcome

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
        elif event.kind == "transition":
            self._show_transition(event.data)
        else:
            if event.data.get("plan", self._plan) != self._plan:
                self._show_plan(event.data["plan"])
            self._console.print(_row(_format_step(event.data)), highlight=False)
            # Not one more: a failed change of the plan may have set the run back.
            self._live.update(self._bar, completed=event.data["step"] + 1 - self._first_step)

    def _show_transition(self, line: Mapping[str, Any]) -> None:
        changes = describe_change(line["from"], line["to"])
        self._console.print(f"plan  {changes}: {describe_outcome(line)}", highlight=False, soft_wrap=True)
        if line["outcome"] == "committed":
            self._plan = line["to"]

    def _show_plan(self, plan: Mapping[str, Any]) -> None:
        self._plan = plan
        for index, part in enumerate(Plan.from_record(plan).describe().split("; ")):
            self._console.print(f"{'plan' if index == 0 else '':5} {part}", highlight=False)


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
