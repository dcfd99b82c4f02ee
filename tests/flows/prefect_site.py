"""A real Prefect server with a worker, as processes of their own, for tests that kill what they run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.chaos.runs import TAG, processes_with

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 120.0
STOP_LIMIT_S = 40.0
BUSY_LIMIT_S = 60.0


@dataclass
class PrefectSite:
    """Where the server is, what its clients are started with, and which processes belong to it."""

    folder: Path
    port: int
    tag: str = field(default_factory=lambda: uuid.uuid4().hex)
    env: dict[str, str] = field(init=False)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_URL": self.api,
            "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{self.folder / 'prefect.db'}",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "INFO",  # the commands of other tests set it for this process
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            TAG: self.tag,
        }

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    def start(self, *arguments: str) -> None:
        """Start a Prefect command that runs until the site is closed; what it says goes to a file."""
        with (self.folder / f"{arguments[0]}.log").open("wb") as log:
            command = [sys.executable, "-m", "prefect", *arguments]
            self.processes.append(subprocess.Popen(command, cwd=self.folder, env=self.env, stdout=log, stderr=log))

    def run(self, *arguments: str) -> None:
        """Run a Prefect command to its end, from the repository's root, where prefect.yaml is."""
        command = [sys.executable, "-m", "prefect", "--no-prompt", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert done.returncode == 0, done.stdout.decode()

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Ask the server: GET, or POST with a body; while its database is busy ask again, as Prefect's clients do."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.api + path, data, {"Content-Type": "application/json"})
        deadline = time.monotonic() + BUSY_LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.SERVICE_UNAVAILABLE or time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    def read_log(self, name: str) -> str:
        """Return what the server or the worker has said so far."""
        return (self.folder / f"{name}.log").read_text()

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert self.processes[0].poll() is None, self.read_log("server")[-2000:]
            assert time.monotonic() < deadline, "the Prefect server does not come up"
            with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.api}/health"):
                return
            time.sleep(0.2)

    def close(self) -> None:
        """End worker and server in good order; whatever doesn't end is killed."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def run_prefect_site(folder: Path) -> Iterator[PrefectSite]:
    """Run a server with a database of its own, the pool `nereus`, the deployments of prefect.yaml and one worker."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        site = PrefectSite(folder, probe.getsockname()[1])
    try:
        site.start("server", "start", "--host", "127.0.0.1", "--port", str(site.port))
        site.wait_until_up()
        site.run("work-pool", "create", "nereus", "--type", "process")
        site.run("deploy", "--all")
        site.start("worker", "start", "--pool", "nereus", "--type", "process")
        yield site
    finally:
        site.close()
    deadline = time.monotonic() + STOP_LIMIT_S
    while left := processes_with(site.tag):
        assert time.monotonic() < deadline, f"processes are left behind: {left}"
        time.sleep(0.1)
