"""Python code in processes of their own, for tests that need other processes, and kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def start_python(
    code: str, *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.Popen[str]:
    """Start Python on some code, from the repository's root; its output is text on a pipe."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **options)


@contextlib.contextmanager
def running_python(code: str, *arguments: str, until: str, env: dict[str, str] | None = None):
    """Run Python on some code from the line `until` of its output on; it is killed in the end."""
    process = start_python(code, *arguments, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line == until, f"the process said {line!r}, not {until!r}"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
