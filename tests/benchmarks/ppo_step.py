"""Seconds of a PPO step by stage, ours against TRL's PPOTrainer: same weights, precision, prompts, lengths and threads.

Run `python -m tests.benchmarks.ppo_step [--works NAME ...] [--trl-python PYTHON] [--quick] [--json FILE]`. The sides
take turns, each in a process of its own that ends before the next begins; the ratio of medians is the result.

The work is equal: actor, critic, frozen reference and a reward model, each of the same size, all responses of the
full length, one epoch. TRL's inference stage makes three forward passes (reference, values, reward) and takes the old
log-probs from its sampler; ours makes four, since the trainer computes them anew. TRL keeps no master weights in
bfloat16, ours are float32.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.ppo_works import WORKS, Inputs, Work, make_quick, prepare_inputs
from tests.benchmarks.report import (
    DEFAULT_MODEL,
    OUT_DIR,
    describe_run,
    print_table,
    refuse,
    require_model,
    write_record,
)

TRL_VERSION = "1.12.0"
TRL_SCRIPT = Path(__file__).with_name("ppo_trl.py")
STAGES = ("generation", "inference", "training", "other", "total")
# At most this share of TRL's time, in each stage and in all.
GOAL = 0.5
# What all workers together may hold.
MEMORY_BYTES = {"smollm2": 16 << 30, "tiny": 4 << 30}


class Sides:
    """Runs either side of one work and keeps the steps that count."""

    def __init__(self, work: Work, inputs: Inputs, *, threads: int, trl_python: str) -> None:
        self.work, self.inputs, self.threads, self.trl_python = work, inputs, threads, trl_python
        self.steps: dict[str, list[dict[str, Any]]] = {}

    def run_nereus(self, workers: int) -> str:
        name = f"nereus {workers} x {self.threads // workers}"
        self._run(name, [sys.executable, "-m", "tests.benchmarks.ppo_nereus"], workers=workers)
        return name

    def run_trl(self) -> str:
        self._run("trl", [self.trl_python, "-P", str(TRL_SCRIPT)])
        return "trl"

    def medians(self, name: str) -> dict[str, float]:
        steps = [step["seconds"] for step in self.steps[name]]
        return {stage: statistics.median(step[stage] for step in steps) for stage in STAGES}

    def _run(self, name: str, command: Sequence[str], **more: Any) -> None:
        spec = {
            "work": asdict(self.work),
            **{key: str(path) for key, path in asdict(self.inputs).items()},
            "threads": self.threads,
            "warm_up": 1,
            "memory_bytes": MEMORY_BYTES[self.work.model],
            **more,
        }
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory() as folder:
            spec_path, out_path = Path(folder) / "spec.json", Path(folder) / "out.json"
            spec_path.write_text(json.dumps(spec))
            run_side([*command, str(spec_path), str(out_path)], self.threads)
            steps = json.loads(out_path.read_text())["steps"]
        self.steps.setdefault(name, []).extend({**step, "load_average": load} for step in steps)
        seconds = ", ".join(f"{step['seconds']['total']:.2f}" for step in steps)
        print(f"  {name:<13} {seconds} s a step (load {load:.1f})", flush=True)


def run_side(command: Sequence[str], threads: int) -> None:
    """Run one side to its end; what it says is shown only when it fails.

    Raises:
        SystemExit: it failed.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-4000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command[:4])} ended with exit code {done.returncode}.")


def measure(work: Work, inputs: Inputs, *, threads: int, trl_python: str) -> dict[str, Any]:
    """Run both sides in turn and return the record of one work; ours runs as one worker and as one a thread."""
    print(work.description, flush=True)
    sides = Sides(work, inputs, threads=threads, trl_python=trl_python)
    ours = [sides.run_nereus(1)]
    if trl_python:
        sides.run_trl()
    if threads > 1:
        ours.append(sides.run_nereus(threads))
    best = min(ours, key=lambda name: sides.medians(name)["total"])
    for _ in range(work.rounds - 1):
        sides.run_nereus(1 if best == ours[0] else threads)
        if trl_python:
            sides.run_trl()
    medians = {name: sides.medians(name) for name in sides.steps}
    theirs = medians.get("trl")
    ratios = theirs and {stage: medians[best][stage] / theirs[stage] for stage in STAGES if theirs[stage] > 0}
    return {**asdict(work), "best": best, "seconds": medians, "ratio_to_trl": ratios, "goal": GOAL, "runs": sides.steps}


def print_rows(rows: Sequence[Mapping[str, Any]], threads: int) -> None:
    lines: list[list[Any]] = []
    for row in rows:
        for name, seconds in row["seconds"].items():
            mark = " *" if name == row["best"] else ""
            lines.append([row["name"], name + mark, *(seconds[stage] for stage in STAGES)])
        if row["ratio_to_trl"]:
            ratios = [row["ratio_to_trl"].get(stage) for stage in STAGES if stage != "other"]
            lines.append(["", f"ratio (goal {row['goal']})", *ratios[:3], None, ratios[3]])
    title = f"seconds a PPO step by stage, {threads} threads in all; * = the faster of ours, workers x threads"
    print_table(title, ["work", "side", *STAGES], lines, num_names=2)


def find_trl(python: str) -> str:
    """Return the interpreter that runs TRL.

    Raises:
        SystemExit: it lacks TRL, or has another version.
    """
    code = "import importlib.metadata as m; print(m.version('trl'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        refuse(f"{python} can't be run; name a Python interpreter that has trl=={TRL_VERSION} with --trl-python.")
    found = done.stdout.strip() if done.returncode == 0 else None
    if found != TRL_VERSION:
        refuse(
            f"{python} has {f'trl {found}' if found else 'no trl'}, and the comparison needs trl=={TRL_VERSION}; run "
            "`pip install -e '.[bench]'`, name an interpreter that has it with --trl-python or NEREUS_TRL_PYTHON, or "
            "measure Nereus alone with --without-trl."
        )
    return python


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS), help="default: all")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="SmolLM2 as a Hugging Face directory")
    parser.add_argument("--threads", type=int, default=2, help="threads in all, for each side")
    parser.add_argument("--rounds", type=int, help="times that each side runs")
    parser.add_argument("--steps", type=int, help="steps that count, each time")
    parser.add_argument("--trl-python", default=os.environ.get("NEREUS_TRL_PYTHON", sys.executable))
    parser.add_argument("--without-trl", action="store_true", help="measure Nereus alone")
    parser.add_argument("--quick", action="store_true", help="small works, one step")
    parser.add_argument("--json", default=str(OUT_DIR / "ppo_step.json"), help="file to write the record to")
    options = parser.parse_args(arguments)
    works = [make_quick(WORKS[name]) if options.quick else WORKS[name] for name in options.works]
    overrides = {key: value for key in ("rounds", "steps") if (value := getattr(options, key)) is not None}
    works = [Work(**{**asdict(work), **overrides}) for work in works]
    if any(work.model == "smollm2" for work in works):
        require_model(options.model)
    trl_python = "" if options.without_trl else find_trl(options.trl_python)
    record = describe_run("ppo_step", threads=options.threads)
    rows = []
    for work in works:
        inputs = prepare_inputs(work, options.model, OUT_DIR / "inputs")
        rows.append(measure(work, inputs, threads=options.threads, trl_python=trl_python))
        write_record({**record, "model": options.model, "trl": TRL_VERSION, "rows": rows}, options.json)
    print_rows(rows, options.threads)


if __name__ == "__main__":
    main()
