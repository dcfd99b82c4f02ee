"""A signal to a run with real workers: one sentence, exit code 1, and no process left behind."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.local import _is_news

ROOT = Path(__file__).resolve().parents[2]
# The start, Prefect's new database included, is over a minute on a slow machine; the end has this long.
START_LIMIT_S = 240.0
END_LIMIT_S = 20.0


@pytest.fixture
def run(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "nereus.cli",
        "run",
        "tiny-cpu",
        "steps=5000",
        "--run-dir",
        str(tmp_path / "amber"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_HOME": str(tmp_path / "prefect")}
    environment.pop("PREFECT_API_URL", None)
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    yield process
    if process.poll() is None:
        started = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for each in started:  # the server would go on, with this pipe in its hands
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(started, timeout=END_LIMIT_S)


def wait_for_steps(process: subprocess.Popen[str], metrics: Path, count: int) -> None:
    end = time.monotonic() + START_LIMIT_S
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the run makes no steps"
        time.sleep(0.05)


@pytest.mark.timeout(START_LIMIT_S + 3 * END_LIMIT_S)
@pytest.mark.parametrize("sent", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_run_and_all_its_processes(run: subprocess.Popen[str], sent: signal.Signals, tmp_path: Path):
    wait_for_steps(run, tmp_path / "amber" / "metrics.jsonl", 2)
    children = psutil.Process(run.pid).children(recursive=True)
    assert len(children) >= 4, "a nursery, two workers, a process that scores, and the server"
    run.send_signal(sent)
    _, said = run.communicate(timeout=END_LIMIT_S)
    assert run.returncode == 1
    mend = f"go on with `nereus resume {tmp_path / 'amber'}`"
    assert said.strip() == f"nereus: Stopped; the workers are freed; {mend}."
    _, alive = psutil.wait_procs(children, timeout=END_LIMIT_S)
    assert not alive


@pytest.mark.parametrize("logger", ["prefect.flow_runs", "prefect.task_runs", "prefect.engine"])
def test_what_prefect_says_of_a_failed_run_is_not_said_twice(logger: str):
    """A signal may come when Prefect has no run to report it by; then its engine does."""
    assert not _is_news(logging.LogRecord(logger, logging.ERROR, "", 0, "Crash detected!", (), None))
    assert _is_news(logging.LogRecord(logger, logging.WARNING, "", 0, "The state of step 3 was not staged.", (), None))
