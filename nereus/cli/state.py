"""What can be done with a run's files: `nereus export` and `nereus report`."""

from typing import Annotated

import typer

from nereus.cli.exits import wrong_input_exits
from nereus.cli.root import RunDirArgument, app


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
