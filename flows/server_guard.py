"""Ends Prefect's ephemeral server with a process that is killed: Prefect ends it at an orderly exit only."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from nereus.progress import Event, watch


@contextmanager
def server_ends_with_us() -> Iterator[None]:
    """While the block runs: once a run is open, its server has a guard that outlives this process by a moment."""
    guards: list[subprocess.Popen[bytes]] = []

    def take_note(event: Event) -> None:
        if event.kind == "opened":
            guards.extend(start_guard([server]) for server in find_servers())

    try:
        with watch(take_note):
            yield
    finally:
        for guard in guards:
            guard.kill()
            guard.communicate()


def find_servers() -> list[int]:
    """Return the processes of API servers that this process has started."""
    return [child.pid for child in psutil.Process().children() if "uvicorn" in child.cmdline()]


def start_guard(pids: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a shell that waits for the end of this process and then ends `pids`: its input closes with us."""
    command = ["sh", "-c", 'read _; kill "$@"', "sh", *map(str, pids)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
