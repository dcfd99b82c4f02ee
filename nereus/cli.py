"""The command line: `nereus COMMAND ...`. Exit codes: 0 done, 2 wrong input, 1 anything else."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from nereus.config import RunConfig, load_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Post-train language models with PPO on execution plans that follow the world.",
)

RunDirArgument = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Directory or URI of a run.")]


@app.callback()
def _commands() -> None:
    """Keep `nereus COMMAND` the form even when there is one command."""


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_YAML", help="A recipe such as tiny-cpu, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted keys, for example steps=10.")
    ] = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Directory or URI that holds all of the run; default runs/<run id>.")
    ] = None,
) -> None:
    """Run one PPO job through the Prefect flow, with live progress."""
    where = [f"run_dir={json.dumps(run_dir)}"] if run_dir is not None else []
    with wrong_input_exits():
        config = load_config(recipe, [*(overrides or []), *where])
        _check_at_the_door(config)
    _quiet_prefect()
    from flows.local import run_here
    from nereus.progress import watch
    from nereus.report.html import read_metrics, write_report
    from nereus.report.summary import summarize
    from nereus.terminal import RunView

    console = Console()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on there are workers to free
    with RunView(console) as view, watch(view):
        try:
            result = run_here(config)
        except KeyboardInterrupt:
            _fail("Stopped; the workers are freed.", 1)
        except Exception as error:
            # At the door everything is wrong input; later a ValueError is a fault like any other.
            _fail(str(error) or repr(error), 2 if isinstance(error, ValueError) and not view.opened else 1)
    summary = summarize(read_metrics(result["run_dir"]))
    console.print(
        f"\n{summary['steps']} steps in {summary['seconds']:.1f} s, {summary['tokens_per_s']:,.0f} tokens/s; "
        f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, "
        f"response length {summary['response_tokens_first']:.1f} -> {summary['response_tokens_last']:.1f}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"model   {result['final']}", highlight=False, soft_wrap=True)
    try:
        console.print(f"report  {write_report(result['run_dir'])}", highlight=False, soft_wrap=True)
    except OSError as error:
        _fail(f"the report can't be written to {result['run_dir']} ({error}); the model is in {result['final']}.", 1)


@app.command()
def export(
    run_dir: RunDirArgument,
    out: Annotated[str, typer.Argument(metavar="OUT", help="New directory or URI for the checkpoint.")],
) -> None:
    """Write a run's actor as a Hugging Face checkpoint that `transformers` loads."""
    from nereus.export import export_run

    with wrong_input_exits():
        names = export_run(run_dir, out)
    typer.echo(f"{len(names)} files written to {out}")


@app.command()
def report(run_dir: RunDirArgument) -> None:
    """Write RUN_DIR/report.html, one file with plots and tables."""
    from nereus.report.html import write_report

    with wrong_input_exits():
        path = write_report(run_dir)
    typer.echo(path)


def _check_at_the_door(config: RunConfig) -> None:
    """Find what is wrong before Prefect starts: the answer comes in seconds, and no failed flow run is left behind."""
    from nereus.runtime.job import check_job

    check_job(config)


@contextmanager
def wrong_input_exits() -> Iterator[None]:
    """Turn a ValueError, our sign of wrong input, into one sentence and exit code 2."""
    try:
        yield
    except ValueError as error:
        _fail(str(error), 2)


def _fail(message: str, code: int) -> NoReturn:
    message = " ".join(message.split())
    Console(stderr=True).print(f"nereus: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)


def _quiet_prefect() -> None:
    """Keep Prefect's log in the terminal to warnings; what the user set in the environment wins.

    Must run before Prefect is imported: it reads these variables then.
    """
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "WARNING")
    # The ephemeral server logs a traceback when it is stopped between two writes; its work is a view, nothing is lost.
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
    os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    os.environ.setdefault("DO_NOT_TRACK", "1")


def main() -> None:
    """Entry point of the `nereus` script."""
    signal.signal(signal.SIGINT, _stop)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(1)


def _stop(*_: object) -> NoReturn:
    """Answer Ctrl-C while there is nothing to free yet: between imports an exception might be taken for another."""
    os.write(2, b"nereus: Stopped.\n")
    os._exit(1)


if __name__ == "__main__":
    main()
