"""Runs the flow in this process, for a terminal that reports errors itself."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect.exceptions import TerminationSignal
from prefect.logging import get_logger

from flows.ppo import train_ppo
from nereus.config import RunConfig


def run_here(config: RunConfig) -> dict[str, Any]:
    """Run `train_ppo` on the configured API, or the ephemeral one, and return its summary.

    Raises:
        KeyboardInterrupt: SIGTERM or Ctrl-C ended the run; its workers are freed.
        Exception: what the run failed with, as it was raised.
    """
    for handler in get_logger().handlers:
        handler.addFilter(_is_news)
    with _sigterm_interrupts():
        try:
            return train_ppo(config)
        except TerminationSignal:
            raise KeyboardInterrupt from None


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


def _is_news(record: logging.LogRecord) -> bool:
    """Drop Prefect's account of a failed run, traceback and all: the caller gets the exception itself."""
    return not (record.levelno >= logging.ERROR and record.name.startswith("prefect.") and "runs" in record.name)
