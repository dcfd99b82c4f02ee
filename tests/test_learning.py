"""It learns: the tiny recipe, from random weights, on three seeds; and SmolLM2 takes real steps where it is at hand."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from nereus.config import load_config
from nereus.runtime.session import Session
from tests.runtime.steps import run_step

SMOLLM2 = Path("models/smollm2-135m-instruct")


class MemoryOfAll:
    """Sum of the proportional set sizes of this process and all its descendants, sampled by a thread.

    A page that several processes share counts once in the sum, unlike in a sum of resident sizes.
    """

    def __init__(self, interval_s: float = 0.5) -> None:
        self.peak_bytes = 0
        self.seen: set[int] = set()
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._interval_s):
            self.sample()

    def sample(self) -> int:
        """Return the sum of this moment."""
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        total = sum(map(proportional_bytes, pids))
        self.seen.update(pids)
        self.peak_bytes = max(self.peak_bytes, total)
        return total


def proportional_bytes(pid: int) -> int:
    """Return a process's proportional set size; 0 if it has just ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def run_recipe(name: str, folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], set[int]]:
    """Return the metrics of a whole run, and the processes of its workers."""
    config = load_config(name, [*overrides, f"run_dir={folder / name}"])
    with Session.open(config, run_id=name) as session:
        return [run_step(session, step) for step in session.steps], set(session.worker_pids().values())


def test_the_memory_of_all_processes_has_that_of_the_children(tmp_path: Path) -> None:
    """What a child fills is in the sum, once."""
    fill = "import time; held = bytearray(b'x') * (200 << 20); print('filled', flush=True); time.sleep(60)"
    with MemoryOfAll(interval_s=0.05) as memory:
        before, wanted = memory.sample(), 180 << 20
        with subprocess.Popen([sys.executable, "-c", fill], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stdout.readline() == b"filled\n"
            deadline = time.monotonic() + 20
            while memory.peak_bytes < before + wanted and time.monotonic() < deadline:
                time.sleep(0.05)
            child.kill()
    assert child.pid in memory.seen
    assert before + wanted <= memory.peak_bytes <= before + (300 << 20)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_tiny_recipe_learns_and_its_responses_grow(tmp_path: Path, seed: int) -> None:
    lines, _ = run_recipe("tiny-cpu", tmp_path, f"seed={seed}")

    def mean(part: list[dict[str, Any]], name: str) -> float:
        return sum(line[name] for line in part) / len(part)

    first, last = lines[:5], lines[-5:]
    assert mean(first, "reward_mean") >= 0.05
    assert mean(last, "reward_mean") >= 3 * mean(first, "reward_mean")
    assert mean(last, "response_tokens_mean") >= 1.5 * mean(first, "response_tokens_mean")
    assert max(line["first_ratio_max_error"] for line in lines) <= 1e-3
    assert sum(line["skipped_updates"] for line in lines) == 0
    # Memory must not creep: what a late step holds is what longer responses need, not what earlier ones left behind.
    assert max(lines[-1]["peak_memory_bytes"].values()) <= 256 << 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches the model")
def test_smollm2_takes_five_real_steps_within_16_gib(tmp_path: Path) -> None:
    with MemoryOfAll() as memory:
        lines, workers = run_recipe("smollm2-135m", tmp_path)
    assert workers and workers <= memory.seen
    assert memory.peak_bytes <= 16 << 30
    assert max(sum(line["peak_memory_bytes"].values()) for line in lines) <= 16 << 30
    assert len(lines) == 5
    for line in lines:
        assert math.isfinite(line["reward_mean"]) and math.isfinite(line["kl_k1"])
        assert line["first_ratio_max_error"] <= 1e-3
        assert line["generation_logprob_gap_max"] <= 1e-3
    assert lines[-1]["policy_version"] == 8
