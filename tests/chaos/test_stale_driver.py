"""A driver that was stopped and taken for dead wakes up: it commits nothing, writes no metrics and says why it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from storage.journal import Journal
from storage.small_files import read_file
from storage.urls import join_url
from tests.chaos.doom import Doom
from tests.chaos.runs import LAUNCH_LIMIT_S, TREE, ChaosRun, Make, list_files, uniform

pytestmark = pytest.mark.long

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


def wait_for(condition: Callable[[], bool], driver: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LAUNCH_LIMIT_S
    while not condition():
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


# It stops where its second commit lacks nothing but the journal's record; and where it has just made sure that it is
# still the driver, before it writes the metrics of its second step.
BEFORE_COMMIT = Doom("journal record", "before", "stop", count=3)
BEFORE_METRICS = Doom("metrics", "middle", "stop", count=2)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("storage", "doom", "wakes_early"),
    [pytest.param("s3", BEFORE_COMMIT, True, marks=pytest.mark.s3), ("local", BEFORE_METRICS, False)],
    ids=["s3, before a commit, woken beside the new driver", "local, before metrics, woken after the end"],
)
def test_a_stale_driver_writes_nothing_more(make_run: Make, storage: str, doom: Doom, wakes_early: bool):
    run = make_run(storage, "float32")
    with stopped_driver(run, doom) as stale:
        run.take_lock_away()
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
    files = [name for name in list_files(run.run_dir) if re.fullmatch(r"journal/\d+\.json|metrics\.jsonl.*", name)]
    return {name: read_file(join_url(run.run_dir, name)) for name in files}
