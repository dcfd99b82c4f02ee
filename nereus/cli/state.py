"""What can be done with the files of a run: `nereus inspect`, `reshard`, `export` and `report`."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from nereus.cli.exits import fail, wrong_input_exits
from nereus.cli.root import RunDirArgument, app

if TYPE_CHECKING:
    from nereus.inspection import Inspection, SetReport

RoleOption = Annotated[Literal["actor", "critic"], typer.Option(help="Which model.")]


@app.command()
def inspect(
    place: Annotated[str, typer.Argument(metavar="RUN_DIR_OR_STATE", help="A run, or the folder of a staged set.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte and check every checksum.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what is committed, and what is damaged; damage gives exit code 1."""
    from nereus.inspection import inspect

    with wrong_input_exits():
        found = inspect(place)
        if verify and found.sets:
            total = sum(report.num_bytes for report in found.sets)
            with _bar("verifying") as show:
                found = inspect(place, verify=True, on_bytes=_adding(show, total))
    if as_json:
        typer.echo(json.dumps(found.to_record(), indent=2))
    else:
        for line in _describe(found):
            typer.echo(line)
    if found.damage:
        count = len(found.damage)
        fail(found.damage[0] if count == 1 else f"{count} faults are found, the first: {found.damage[0]}", 1)


@app.command()
def reshard(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A staged set, a run, or a Hugging Face checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="New directory or URI.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")],
    pp: Annotated[int, typer.Option(help="Pipeline stages.")],
    to: Annotated[Literal["state", "hf"], typer.Option(help="Staged state or a Hugging Face checkpoint.")] = "state",
    role: RoleOption = "actor",
) -> None:
    """Rewrite staged state or a checkpoint so that each rank of a layout finds its bytes together."""
    from nereus.reshard import reshard

    with wrong_input_exits(), _bar("copying") as show:
        done = reshard(source, target, tp=tp, pp=pp, to=to, role=role, on_progress=show)
    _tell(done.notes)
    typer.echo(f"{len(done.files)} files, {_size(done.num_bytes)} written to {target}")


@app.command()
def export(
    run_dir: RunDirArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="New directory or URI for the checkpoint.")],
    role: RoleOption = "actor",
    step: Annotated[int | None, typer.Option(help="Step of the commit to read; default: the newest.")] = None,
) -> None:
    """Write what a run has trained as a Hugging Face checkpoint that `transformers` loads."""
    from nereus.export import export_run

    with wrong_input_exits(), _bar("exporting") as show:
        done = export_run(run_dir, out, role=role, step=step, on_progress=show)
    _tell(done.notes)
    origin = "final/" if done.step is None else f"the commit of step {done.step}"
    typer.echo(f"{len(done.files)} files of {origin} written to {out}")


@app.command()
def report(run_dir: RunDirArgument) -> None:
    """Write RUN_DIR/report.html, one file with plots and tables."""
    from nereus.report.html import write_report

    with wrong_input_exits():
        path = write_report(run_dir)
    typer.echo(path)


def _describe(found: "Inspection") -> Iterator[str]:
    """Yield the lines of `nereus inspect`."""
    if found.take_overs:
        drivers, last = len(found.take_overs), found.take_overs[-1]
        yield f"run     {found.run_id}, {found.steps} steps; {drivers} driver{'s' * (drivers != 1)}, " \
              f"the last on {last.get('host')} (pid {last.get('pid')})"  # fmt: skip
    for report in found.sets:
        yield from _describe_set(report)
    if found.retired:
        count = len(found.retired)
        yield f"{count} older commit{'s have' if count > 1 else ' has'} been replaced by newer ones"
    if found.uncommitted:
        yield f"not committed (being written, or left by a killed driver): {', '.join(found.uncommitted)}"
    if found.journal_damage:
        yield "without an intact journal nobody knows which sets are commits"
    elif not found.sets:
        yield "no commit yet"
    elif not found.damage:
        yield "every byte is as it was written" if found.verified else "manifests are intact; --verify reads every byte"


def _describe_set(report: "SetReport") -> Iterator[str]:
    step = "?" if report.step is None else report.step
    written = f", written {report.written_at}" if report.written_at else ""
    yield f"step {step:<4}{report.name}: {_size(report.num_bytes)}{written}"
    for group, held in report.groups.items():
        entry = report.plan.get(group) or {}
        plan = f", plan {entry['dp']}x{entry['tp']}x{entry['pp']}" if {"dp", "tp", "pp"} <= entry.keys() else ""
        yield f"         {group}: {held.num_tensors} tensors, {_size(held.num_bytes)}{plan}"
    for sentence in report.damage:
        yield f"         damaged: {sentence}"


def _size(num_bytes: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def _tell(notes: tuple[str, ...]) -> None:
    for note in notes:
        typer.echo(f"nereus: {note}", err=True)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function of (bytes done, bytes in all) that draws a bar where stderr is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _adding(show: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    done = 0

    def add(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        show(done, total)

    return add
