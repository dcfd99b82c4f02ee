"""Runs whose workers are struck in the midst of a transition, on an engine that the next run uses again."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import nereus.runtime.elastic_steps
from nereus.config import build_config
from nereus.runtime.deaths import Deaths
from nereus.runtime.job import prepare_job
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from storage.records import read_records
from tests.chaos.job import read_live
from tests.chaos.points import PointDoom, PointFolder
from tests.chaos.scenarios import CHANGE, TREE, Scenario, all_on, slow_links
from tests.runtime.steps import run_step

_run_ids = itertools.count()
END_LIMIT_S = 10.0


@dataclass
class Struck:
    """What a run came to.

    Attributes:
        digests: of the tokens of each step.
        state: live parameters and moments in the end.
        lines: of transitions.jsonl.
        unmet: dooms that nobody came to.
        points: that were recorded, by device.
    """

    digests: list[str]
    state: dict[str, np.ndarray]
    lines: list[dict[str, Any]]
    unmet: list[str]
    points: dict[int, list[str]]

    @property
    def is_met(self) -> bool:
        return not [point for point in self.unmet if point]

    @property
    def outcomes(self) -> str:
        return ", ".join(line["outcome"] for line in self.lines) or "none"


class StruckRuns:
    """Runs one after the other on workers that are told by a folder when to die."""

    def __init__(self, folder: Path, *, silent_after_s: float = 60.0) -> None:
        folder.mkdir(parents=True)
        self.points = PointFolder(folder)
        self.points.announce()
        self.engine = LocalEngine(
            "tests.chaos.points:PointRank",
            memory_per_device_bytes=2 << 30,
            heartbeat_s=0.2,
            silent_after_s=silent_after_s,
        )

    def run(
        self,
        run_dir: Path,
        scenario: Scenario,
        doom: PointDoom | None,
        prepare: Callable[[Session], None] = lambda session: None,
    ) -> Struck:
        """Run a job whose plan changes once, with a doom from the change on.

        Args:
            prepare: is called with the open session.
        """
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Deaths, "take_wait_s", lambda *_: 0.05)
            if scenario.dear_links:
                patched.setattr(nereus.runtime.elastic_steps, "measure_speeds", lambda *_, **__: slow_links())
            result = self._run(run_dir, scenario, doom, prepare)
        self._check_nothing_left(run_dir)
        return result

    def _run(
        self, run_dir: Path, scenario: Scenario, doom: PointDoom | None, prepare: Callable[[Session], None]
    ) -> Struck:
        config = build_config(scenario.config(os.fspath(run_dir)))
        self._take_workers(prepare_job(config).plan.devices)
        unmet: list[str] = []
        points: dict[int, list[str]] = {}
        is_doomed = True
        self.points.slow_down(scenario.shard_s)
        with Session.open(config, run_id=f"struck{next(_run_ids)}", engine=self.engine) as session:
            session.job = scenario.tighten(session.job)
            prepare(session)
            with owning(session):
                while (step := session.next_step) < config.steps:
                    if session.transition_due(step):
                        if is_doomed:
                            self.points.write(doom)
                        session.begin_transition(step)
                        session.run_transition()
                        if is_doomed:
                            unmet, points, is_doomed = self.points.end(), self.points.points(), False
                        continue
                    run_step(session, step)
                    session.stage_state(step)
                state = read_live(session)
                session.finish()
            lines = session.read_metrics()
        assert [line["step"] for line in lines] == list(range(config.steps))
        records = read_records(f"{run_dir}/transitions.jsonl")
        return Struck([line["rollouts_digest"] for line in lines], state, records, unmet, points)

    def _take_workers(self, devices: tuple[int, ...]) -> None:
        """Have workers on these devices and no others, all of them as a new engine would."""
        if self.engine.broken is not None:
            self.engine.recover()
        self.engine._deaths = Deaths()
        living = set(self.engine.pids())
        if living - set(devices):
            self.engine.release(living - set(devices))
        missing = sorted(set(devices) - living)
        if missing:
            self.engine.start(missing)

    def _check_nothing_left(self, run_dir: Path) -> None:
        """No process but the workers, no set but the newest commits, no file half written."""
        deadline = time.monotonic() + END_LIMIT_S
        assert self.engine._nursery is not None
        nursery = psutil.Process(self.engine._nursery.pid)
        while left := {child.pid for child in nursery.children(recursive=True)} - {*self.engine.pids().values()}:
            assert time.monotonic() < deadline, f"processes are left behind: {left}"
            time.sleep(0.05)
        leaking = {device: pid for device, pid in self.engine.pids().items() if _maps_shared_memory(pid)}
        assert not leaking, f"a released worker still has shared memory: {leaking}"
        sets = sorted(os.listdir(run_dir / "state"))
        assert len(sets) <= 2 and all(name.startswith("step-") for name in sets), sets
        strays = [str(file) for file in run_dir.rglob("*") if "tmp" in file.name or file.name.startswith(".")]
        assert not strays, strays


def _maps_shared_memory(pid: int) -> bool:
    """Return whether a process has a communicator's memory or its descriptor."""
    links = [file for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    return any("memfd:nereus" in os.readlink(file) for file in links) or (
        "memfd:nereus" in Path(f"/proc/{pid}/maps").read_text()
    )


@contextmanager
def owning(session: Session) -> Iterator[None]:
    """Workers come and go with the plan, as in a session with an engine of its own."""
    session._owns_engine = True
    try:
        yield
    finally:
        session._owns_engine = False


def run_undisturbed(runs: StruckRuns, run_dir: Path) -> Struck:
    """Run the same job on one device, on one plan."""
    alone = all_on(1, 1, 1, 0)
    return runs.run(run_dir, Scenario(alone, alone), None)


def assert_same(run: Struck, base: Struck) -> None:
    """Check that nothing but the layout has changed."""
    assert run.digests == base.digests
    assert run.state.keys() == base.state.keys()
    for name, array in run.state.items():
        assert np.abs(array - base.state[name]).max() <= 1e-9, name


assert TREE["steps"] > CHANGE + 1, "a change that failed is tried again at the next step"
