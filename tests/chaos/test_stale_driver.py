"""A driver that was stopped and taken for dead wakes up: it commits nothing, writes no metrics and says why it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from storage.journal import Journal
from tests.chaos.doom import Doom
from tests.chaos.runs import LAUNCH_LIMIT_S, TREE, ChaosRun, uniform

ONE_DEVICE = uniform(dp=1, tp=1, pp=1)


@contextmanager
def stopped_driver(run: ChaosRun, doom: Doom) -> Iterator[subprocess.Popen[str]]:
    """Run a driver until it stops itself at the point of its doom; it is killed in the end, should it still live."""
    driver = run.start(ONE_DEVICE, doom)
    try:
        wait_for(lambda: psutil.Process(driver.pid).status() == psutil.STATUS_STOPPED, driver)
        yield driver
    finally:
        driver.kill()
        driver.communicate()


def wait_for(condition, driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LAUNCH_LIMIT_S
    while not condition():
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def take_lock_away(run: ChaosRun) -> None:
    """Make the lock one that the next driver doesn't meet, as if it were on another host: the lease has to run out."""
    os.unlink(Path(run.run_dir) / "journal" / "driver.lock")


# It stops where its second commit lacks nothing but the journal's record; and where it has just made sure that it is
# still the driver, before it writes the metrics of its second step.
BEFORE_COMMIT = Doom("journal record", "before", "stop", count=3)
BEFORE_METRICS = Doom("metrics", "middle", "stop", count=2)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("doom", "wakes_early"),
    [(BEFORE_COMMIT, True), (BEFORE_METRICS, False)],
    ids=["before a commit, woken beside the new driver", "before metrics, woken after the end"],
)
def test_a_stale_driver_writes_nothing_more(tmp_path: Path, doom: Doom, wakes_early: bool):
    run = ChaosRun(str(tmp_path / "run"), tmp_path / "scratch", "float32")
    with stopped_driver(run, doom) as stale:
        take_lock_away(run)
        driver = run.start(ONE_DEVICE)
        if wakes_early:
            wait_for(lambda: len(take_overs(run)) == 2, driver)
            stale.send_signal(signal.SIGCONT)
        launch = run.end(driver)
        written = read_records_of(run)
        stale.send_signal(signal.SIGCONT)
        fenced = run.end(stale)
    assert launch.returncode == 0, launch.said
    assert "waiting 2 s for a sign of life" in launch.said
    assert fenced.returncode == 1
    assert fenced.said == f"failed: another driver has taken over {run.run_dir}; this one stops.\n"
    assert read_records_of(run) == written
    assert [line["step"] for line in run.read_outcome().metrics] == list(range(TREE["steps"]))
    first, second = take_overs(run)
    assert {commit.number for commit in run.commits() if commit.number < second} <= {first + 1}
    run.check_nothing_left()


def take_overs(run: ChaosRun) -> list[int]:
    return [entry.number for entry in Journal(run.run_dir).entries() if entry.kind == "take_over"]


def read_records_of(run: ChaosRun) -> dict[str, bytes]:
    """Return the journal and the metrics, as they lie there."""
    files = [*Path(run.run_dir).glob("journal/*.json"), Path(run.run_dir) / "metrics.jsonl"]
    return {str(file): file.read_bytes() for file in files}
