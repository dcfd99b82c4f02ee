"""How commands end in failure: one sentence on stderr and an exit code, 2 for wrong input, 1 for anything else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console


@contextmanager
def wrong_input_exits() -> Iterator[None]:
    """Turn a ValueError, our sign of wrong input, into one sentence and exit code 2."""
    try:
        yield
    except ValueError as error:
        fail(str(error), 2)


def fail(message: str, code: int) -> NoReturn:
    """Print one sentence on stderr and end the command with an exit code."""
    message = " ".join(message.split())
    Console(stderr=True).print(f"nereus: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(code)
