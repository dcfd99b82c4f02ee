"""The command line: `nereus COMMAND ...`. Exit codes: 0 done, 2 wrong input, 1 anything else."""

import signal
import sys

# Each of these files adds its commands to the app; the order here is that of `nereus --help`.
import nereus.cli.run

# isort: split
import nereus.cli.control
import nereus.cli.plan
import nereus.cli.simulate
import nereus.cli.state  # noqa: F401
from nereus.cli.root import app, stop

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the `nereus` script."""
    signal.signal(signal.SIGINT, stop)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(1)
