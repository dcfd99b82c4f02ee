"""Runs that are killed and go on: processes of `tests.chaos.job`, what they leave, and what must not be left."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nereus.commits import Commit, live_commits, read_commit
from nereus.staged_state import STAGED
from storage.journal import Journal
from storage.manifest import Manifest
from storage.records import read_records
from storage.state import verify_state
from storage.urls import join_url, local_path, open_filesystem
from tests.chaos.doom import Doom
from tests.chaos.outcome import Outcome, read_committed
from tests.parity.runs import ODD_TINY, uniform_layouts

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")
MOST_WORKERS = 4
# A launch is over in seconds; on a machine with much else to do it takes longer.
LAUNCH_LIMIT_S = 200.0
END_LIMIT_S = 10.0
TAG = "NEREUS_TEST_TAG"
# All that a run goes on with shows in the numbers: learning rates and KL weight hang on what was done before.
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "model": {"tiny": ODD_TINY},
    "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 16, "max_response_tokens": 10},
    "ppo": {
        "minibatches": 2,
        "actor_lr": 3e-3,
        "critic_lr": 3e-3,
        "lr_warmup_updates": 8,
        "weight_decay": 0.1,
        "kl_adaptive": True,
        "kl_target": 0.1,
        "kl_horizon": 60,
    },
    "steps": 6,
    "seed": 5,
    "staging": {"keep": 2, "lease_s": 2},
}
KEEP = TREE["staging"]["keep"]
# What a run directory holds beside staged state.
_OTHER_FILES = re.compile(
    r"run\.yaml|(journal|control)/\d{8}\.json|(metrics|transitions|decisions)\.jsonl(/\d{8}\.json)?|final/[\w.-]+"
)

Plan = Mapping[str, Mapping[str, Any]]
Schedule = Sequence[Sequence[Any]]  # of [step, plan]
Make = Callable[..., "ChaosRun"]


@dataclass(frozen=True)
class Launch:
    """How one process ended: its exit code, what it said, and whether it came to its doom."""

    returncode: int
    said: str
    struck: bool


class ChaosRun:
    """One run and the processes that drive it, one after the other."""

    def __init__(self, run_dir: str, scratch: Path, precision: str, env: Mapping[str, str] | None = None) -> None:
        """Describe the run.

        Args:
            run_dir: a path or URL that doesn't exist yet.
            scratch: local folder for what the run itself doesn't hold.
            precision: of the run.
            env: of its processes, such as the address of a store.
        """
        self.run_dir, self.scratch, self.precision = run_dir, scratch, precision
        self._tag = uuid.uuid4().hex
        self._state = scratch / "state.npz"
        self._temporary = scratch / "tmp"
        self._temporary.mkdir(parents=True)
        self._env = {
            **os.environ,
            **(env or {}),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self._temporary),
            TAG: self._tag,
        }

    def start(
        self, plan: Plan | Schedule, doom: Doom | None = None, changes: Mapping[str, Any] | None = None
    ) -> subprocess.Popen[str]:
        """Start a driver on a plan, on as many devices as it names; it resumes if there is something to go on with.

        Args:
            plan: one, or a schedule of some.
            changes: of the config.
        """
        plans: list[Plan] = [plan] if isinstance(plan, Mapping) else [part for _, part in plan]
        devices = 1 + max(device for part in plans for entry in part.values() for device in entry["devices"])
        cluster = {"devices": devices, "memory_per_device": "2GiB"}
        tree = {**TREE, **(changes or {}), "plan": plan, "cluster": cluster}
        return self._start("tests.chaos.job", tree, {"doom": None if doom is None else asdict(doom)})

    def _start(self, module: str, tree: Mapping[str, Any], what: Mapping[str, Any]) -> subprocess.Popen[str]:
        """Start a driver; what it has met is in the file `report` of its process afterwards.

        Args:
            module: of the driver.
            tree: of its config, but for what is the run's own.
            what: is to happen to it, by the names that the module knows.
        """
        spec = self.scratch / f"{uuid.uuid4().hex}.json"
        content = {
            "config": {**tree, "precision": self.precision, "run_dir": self.run_dir},
            "resume": bool(Journal(self.run_dir).entries()),
            "report": str(spec.with_suffix(".struck")),
            "state": str(self._state),
            **what,
        }
        spec.write_text(json.dumps(content))
        command = [sys.executable, "-m", module, str(spec)]
        process = subprocess.Popen(command, env=self._env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        process.report = spec.with_suffix(".struck")  # type: ignore[attr-defined]
        return process

    def end(self, process: subprocess.Popen[str], limit_s: float = LAUNCH_LIMIT_S) -> Launch:
        """Wait for the end of a driver and of all processes that it had."""
        try:
            _, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            raise AssertionError(f"a driver did not end within {limit_s:g} s:\n{said}") from None
        return Launch(process.returncode, said, process.report.exists())  # type: ignore[attr-defined]

    def launch(
        self, plan: Plan | Schedule, doom: Doom | None = None, changes: Mapping[str, Any] | None = None
    ) -> Launch:
        """Run one driver to its end, and wait until none of its processes is left; arguments as of `start`."""
        launch = self.end(self.start(plan, doom, changes))
        self.wait_until_alone()
        check_end(launch, doom)
        return launch

    def wait_until_alone(self) -> None:
        """Wait until no process of this run lives.

        Raises:
            AssertionError: some live on.
        """
        deadline = time.monotonic() + END_LIMIT_S
        while left := processes_with(self._tag):
            assert time.monotonic() < deadline, f"processes are left behind: {left}"
            time.sleep(0.05)

    # What is there

    def commits(self) -> tuple[Commit, ...]:
        """Return the commits that a resume can choose from."""
        return live_commits(Journal(self.run_dir).entries())

    @property
    def is_remote(self) -> bool:
        return local_path(self.run_dir) is None

    @property
    def steps_left(self) -> int:
        """Steps that a resumed driver has to do."""
        commits = self.commits()
        return TREE["steps"] - (commits[-1].step + 1 if commits else 0)

    @property
    def state_root(self) -> str:
        return join_url(self.run_dir, "state")

    def check_commits(self) -> None:
        """Check that whatever the journal names last is whole, however its writer ended."""
        for commit in self.commits()[-1:]:
            read_commit(self.state_root, commit)
            assert verify_state(join_url(self.state_root, commit.set_name)) == []

    def read_outcome(self) -> Outcome:
        """Return what the finished run came to; the last commit must hold what live memory held, bit by bit."""
        with np.load(self._state) as file:
            state = {name: file[name] for name in file.files}
        committed = read_committed(self.run_dir)
        assert committed.keys() == state.keys()
        differing = [name for name, array in state.items() if array.tobytes() != committed[name].tobytes()]
        assert not differing, f"the last commit differs from live memory in {differing[:3]}"
        return Outcome(read_records(join_url(self.run_dir, "metrics.jsonl")), state)

    def take_lock_away(self) -> None:
        """Put the lock where the next driver does not look, as if it were on another host: it waits for the lease."""
        local = local_path(self.run_dir)
        (lock,) = Path(local).glob("journal/driver.lock") if local is not None else self._temporary.glob("*/*.lock")
        lock.unlink()

    def check_nothing_left(self) -> None:
        """Check that the run directory holds the run and nothing else, and this machine nothing of it."""
        self.wait_until_alone()
        kept = {c.set_name: read_commit(self.state_root, c) for c in self.commits()[-KEEP:]}
        files, state = list_files(self.run_dir), _state_files(kept)
        strays = sorted(file for file in files - state if not _OTHER_FILES.fullmatch(file))
        assert not strays, f"left in the run directory: {strays}"
        assert state <= files, f"missing: {sorted(state - files)}"
        temporary = [str(path) for path in self._temporary.rglob("*") if not path.is_dir()]
        assert not temporary, f"left in the folder for temporary files: {temporary}"

    def damage_newest(self, rng: random.Random) -> Commit:
        """Flip a bit of the data of the newest commit, and return the one before, which a resume has to use."""
        *_, before, newest = self.commits()
        shard = rng.choice(read_commit(self.state_root, newest).shards)
        url = join_url(self.state_root, f"{newest.set_name}/{shard.file}")
        filesystem, path = open_filesystem(url)
        data = bytearray(filesystem.cat_file(path))
        data[rng.randrange(shard.header_bytes, len(data))] ^= 1 << rng.randrange(8)
        filesystem.pipe_file(path, bytes(data))
        return before


def check_end(launch: Launch, doom: Doom | None) -> None:
    """Check that a driver ended as its doom has it: killed, or with one sentence that names the lost worker."""
    if not launch.struck:
        assert launch.returncode == 0, launch.said
    elif doom is not None and doom.victim == "worker":
        assert launch.returncode == 1, launch.said
        assert "failed: device " in launch.said and "SIGKILL" in launch.said, launch.said
        assert "Traceback" not in launch.said, launch.said
    else:
        assert launch.returncode == -9, launch.said


def processes_with(tag: str) -> list[str]:
    """Return the command lines of living processes whose environment holds a tag."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{TAG}={tag}".encode() in (folder / "environ").read_bytes():
                found.append(f"{folder.name} {(folder / 'cmdline').read_text()[:200]}")
        except OSError:  # it has ended, or belongs to another user
            continue
    return found


def list_files(url: str) -> set[str]:
    """Return all files of a folder, by their names from there on."""
    path = local_path(url)
    if path is not None:
        return {str(file.relative_to(path)) for file in Path(path).rglob("*") if not file.is_dir()}
    filesystem, folder = open_filesystem(url)
    return {name.removeprefix(f"{folder}/") for name in filesystem.find(folder)}


def _state_files(kept: Mapping[str, Manifest]) -> set[str]:
    shards = {f"state/{name}/{shard.file}" for name, manifest in kept.items() for shard in manifest.shards}
    return shards | {f"state/{name}/manifest.json" for name in kept}


# Drawing


def draw_plan(rng: random.Random, most_workers: int = MOST_WORKERS) -> dict[str, dict[str, Any]]:
    """Draw a number of devices, and layout, devices in any order and micro-batch of each model-stage on its own."""
    count = rng.randint(1, most_workers)
    plan = {}
    for name in STAGES:
        dp, tp, pp = rng.choice(uniform_layouts(count))
        devices = rng.sample(range(count), dp * tp * pp)
        plan[name] = {"dp": dp, "tp": tp, "pp": pp, "devices": devices, "micro_batch": rng.randint(1, 5)}
    return plan


def uniform(*, dp: int, tp: int, pp: int) -> dict[str, dict[str, Any]]:
    """Return the plan with one layout for all model-stages, on devices from 0 on."""
    return {name: {"dp": dp, "tp": tp, "pp": pp, "devices": [*range(dp * tp * pp)]} for name in STAGES}


def draw_device(rng: random.Random, plan: Plan, moment: str) -> int:
    """Draw a device whose worker comes to a moment."""
    names: tuple[str, ...] = STAGED
    if moment == "generation":
        names = ("actor.generation",)
    elif moment == "weight sync":
        names = ("actor.training", "actor.generation")
    return rng.choice(sorted({device for name in names for device in plan[name]["devices"]}))
