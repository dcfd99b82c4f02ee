"""The application that the commands of the other files are added to, and what they share."""

import os
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Post-train language models with PPO on execution plans that follow the world.",
)

RunDirArgument = Annotated[str, typer.Argument(metavar="RUN_DIR", help="Directory or URI of a run.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Dotted keys, for example steps=10.")
]


@app.callback()
def _commands() -> None:
    """Keep `nereus COMMAND` the form even when there is one command."""


def stop(*_: object) -> NoReturn:
    """Answer Ctrl-C while there is nothing to free yet: between imports an exception might be taken for another."""
    os.write(2, b"nereus: Stopped.\n")
    os._exit(1)
