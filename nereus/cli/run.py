"""`nereus run` and `nereus resume`: a PPO job through the Prefect flow, with live progress."""

import json
import os
import shlex
import signal
from typing import Annotated

import typer
from rich.console import Console

from nereus.cli.exits import fail, wrong_input_exits
from nereus.cli.root import OverridesArgument, RunDirArgument, app
from nereus.config import RunConfig, load_config
from storage.errors import hide_credentials


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE_OR_YAML", help="A recipe such as tiny-cpu, or a YAML file.")],
    overrides: OverridesArgument = None,
    run_dir: Annotated[
        str | None, typer.Option(help="Directory or URI that holds all of the run; default runs/<run id>.")
    ] = None,
) -> None:
    """Run one PPO job through the Prefect flow, with live progress."""
    where = [f"run_dir={json.dumps(run_dir)}"] if run_dir is not None else []
    with wrong_input_exits():
        config = load_config(recipe, [*(overrides or []), *where])
        _check_at_the_door(config)
    _run_flow(config)


@app.command()
def resume(run_dir: RunDirArgument, overrides: OverridesArgument = None) -> None:
    """Go on with a run from its last commit, on the devices that there are now."""
    with wrong_input_exits():
        from nereus.resume import check_resumable

        config = check_resumable(run_dir, overrides or [])
    _run_flow(config, resume_from=run_dir)


def _run_flow(config: RunConfig, *, resume_from: str | None = None) -> None:
    """Run the flow in this process, show how it goes, and end the command if it fails."""
    _quiet_prefect()
    from flows.local import run_here
    from nereus.progress import watch
    from nereus.terminal import RunView
    from storage.journal import FencedOff

    console = Console()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on there are workers to free
    with RunView(console) as view, watch(view):
        try:
            result = run_here(config, resume_from=resume_from)
        except KeyboardInterrupt:
            fail(_with_mend("Stopped; the workers are freed", view.run_dir or resume_from), 1)
        except FencedOff as error:  # the run goes on without us
            fail(str(error), 1)
        except Exception as error:
            # At the door everything is wrong input; later a ValueError is a fault like any other.
            if isinstance(error, ValueError) and view.run_dir is None:
                fail(str(error), 2)
            fail(_with_mend(str(error) or repr(error), view.run_dir or resume_from), 1)
    _tell_result(console, result["run_dir"], result["final"])


def _with_mend(sentence: str, run_dir: str | None) -> str:
    """Return a sentence that says how a run goes on, if there is one."""
    if run_dir is None:
        return f"{sentence.rstrip('.')}."
    return f"{sentence.rstrip('.')}; go on with `nereus resume {shlex.quote(hide_credentials(run_dir))}`."


def _tell_result(console: Console, run_dir: str, final: str) -> None:
    from nereus.report.html import read_metrics, write_report
    from nereus.report.summary import summarize
    from nereus.terminal import show_plans

    history = read_metrics(run_dir)
    summary = summarize(history)
    if any(line.get("predicted_s") for line in history):
        show_plans(console, history)
    console.print(
        f"\n{summary['steps']} steps in {summary['seconds']:.1f} s, {summary['tokens_per_s']:,.0f} tokens/s; "
        f"reward {summary['reward_first']:.3f} -> {summary['reward_last']:.3f}, "
        f"response length {summary['response_tokens_first']:.1f} -> {summary['response_tokens_last']:.1f}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"model   {final}", highlight=False, soft_wrap=True)
    try:
        console.print(f"report  {write_report(run_dir)}", highlight=False, soft_wrap=True)
    except ValueError as error:
        fail(f"There is no report, since {str(error).rstrip('.')}; the model is in {final}.", 1)


def _check_at_the_door(config: RunConfig) -> None:
    """Find what is wrong before Prefect starts: the answer comes in seconds, and no failed flow run is left behind."""
    from nereus.runtime.job import check_job

    check_job(config)


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
