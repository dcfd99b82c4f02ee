"""The devices of a running job: notices that outlive their workers, and deadlines that end them."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from nereus.control import tell_drain, tell_scale
from nereus.runtime.devices_there import Deadlines, DevicesThere, out_of_time
from nereus.supply import Supply


def engine_with(*noticed: int, pids: dict[int, int] | None = None) -> Any:
    return SimpleNamespace(notices=lambda: frozenset(noticed), quarantined=set(), pids=lambda: pids or {})


def test_a_noticed_device_stays_away_until_a_scale_covers_it_and_may_be_noticed_again(tmp_path: Path) -> None:
    there = DevicesThere(str(tmp_path), 2, ())
    assert there.look(0, engine_with()).present == (0, 1)
    assert there.look(1, engine_with(1)).present == (0,)
    assert there.look(2, engine_with()).present == (0,), "its worker is gone, and the notice with it"
    tell_scale(str(tmp_path), 2)
    assert there.look(3, engine_with()).present == (0, 1)
    assert there.look(4, engine_with(1)).present == (0,)
    assert there.look(5, engine_with()).present == (0,)


def test_devices_without_a_deadline_are_never_out_of_time() -> None:
    now = time.time()
    supply = Supply((0,), {1: now + 5, 2: now + 50, 3: None, 4: now + 5}, "")
    assert out_of_time(supply, (1, 2, 3), 10) == {1}


def test_a_worker_ends_at_the_deadline_of_its_device_if_the_plan_uses_it(tmp_path: Path) -> None:
    workers = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    pids = {device: worker.pid for device, worker in enumerate(workers)}
    deadlines = Deadlines(str(tmp_path), engine_with(pids=pids), lambda: (0, 1))
    deadlines.start()
    try:
        tell_drain(str(tmp_path), 1, time.time() + 0.2)
        tell_drain(str(tmp_path), 2, time.time() + 0.2)
        assert workers[1].wait(timeout=20) == -signal.SIGKILL
        assert workers[0].poll() is None and workers[2].poll() is None
    finally:
        deadlines.close()
        for worker in workers:
            worker.kill()
            worker.wait()
