"""Runs the flow in this process, for a terminal that reports errors itself."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from prefect.exceptions import TerminationSignal
from prefect.logging import get_logger
from prefect.logging.configuration import setup_logging

from flows.ppo import train_ppo
from flows.server_guard import server_ends_with_us
from nereus.config import RunConfig

# Loggers that Prefect reports the end of a run by; `engine` where a signal came before the run had one of its own.
_ACCOUNTS_OF_A_RUN = ("prefect.flow_runs", "prefect.task_runs", "prefect.engine")


def run_here(config: RunConfig, resume_from: str | None = None) -> dict[str, Any]:
    """Run `train_ppo` on the configured API, or the ephemeral one, and return its summary.

    Args:
        config: the run.
        resume_from: run directory to go on with; None begins a new run.

    Raises:
        KeyboardInterrupt: SIGTERM or Ctrl-C ended the run; its workers are freed.
        Exception: what the run failed with, as it was raised.
    """
    # Prefect's threads would import what runs their loops at the very time when the flow begins; a signal that
    # interrupts the main thread at that import leaves Python's import lock taken, and they wait for it for ever.
    anyio.run(_load_backend)
    # Prefect makes its handlers when a flow starts; made now they can be filtered, and it keeps them.
    setup_logging()
    for handler in (*logging.getLogger().handlers, *get_logger("_internal").handlers):
        handler.addFilter(_is_news)
    with _sigterm_interrupts(), server_ends_with_us():
        try:
            return train_ppo(config, resume_from)
        except TerminationSignal:
            raise KeyboardInterrupt from None
        except Exception as error:
            # Ctrl-C reaches the ephemeral server too; what is raised then is that it can't be told of the end.
            if _follows_a_signal(error):
                raise KeyboardInterrupt from None
            raise


async def _load_backend() -> None:
    anyio.Event()  # parts of it are loaded when they are first used
    async with anyio.create_task_group():
        await anyio.sleep(0)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Let SIGTERM end this process by an exception.

    Prefect ends the flow run first, then sends the signal again to whoever had it before; Python's default would end
    the process without a word.
    """

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _follows_a_signal(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, KeyboardInterrupt | TerminationSignal):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_news(record: logging.LogRecord) -> bool:
    """Drop from the terminal what is told elsewhere.

    Prefect's account of a failed run, traceback and all, since the caller gets the exception itself; and its note that
    the last events of a view are still on their way.
    """
    is_failure = record.levelno >= logging.ERROR and record.name.startswith(_ACCOUNTS_OF_A_RUN)
    return not is_failure and "Still processing items" not in record.getMessage()
