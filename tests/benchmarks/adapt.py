"""Whether adapting pays: whole runs of the recipe `growth-cpu` under each policy, `make bench-adapt`.

    python -m tests.benchmarks.adapt [--quick] [--seeds N] [--policies P ...] [--json FILE] [key=value ...]

The runs of one seed are all open at the same time and take turns step by step, each step in another order, so that a
machine that gets slower or quicker does so for all of them. With one seed all have the same rollouts in every step.
From seed to seed the devices come and go one step later, so that no policy's schedule fits the trace by chance. The
seeds are three whose untrained model answers in about 12 tokens, which leaves it room to grow.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from nereus.config import load_config
from tests.benchmarks.adapt_tables import print_report
from tests.benchmarks.report import OUT_DIR, describe_run, write_record

RECIPE = "growth-cpu"
SEEDS = (0, 8, 15)
POLICIES = ("payback", "fixed", "every_k", "any_gain")
# A run of a few steps that still grows, loses a device and gets it back: it shows that everything runs.
QUICK = ("steps=9", "ppo.actor_lr=3e-4", "rollout.max_response_tokens=48", "drift.devices=[[0,2],[3,1],[5,2]]")

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and a few steps: no numbers to quote")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), choices=range(1, 1 + len(SEEDS)), help="how many")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--json", default=str(OUT_DIR / "adapt.json"))
    parser.add_argument("--from", dest="source", help="records of an earlier run, as --json has written them")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of the recipe")
    options = parser.parse_intermixed_args(arguments)
    if options.source:
        print_report(json.loads(Path(options.source).read_text())["runs"])
        return 0
    overrides = [*(QUICK if options.quick else ()), *options.overrides]
    record: Record = {**describe_run("adapt", threads=1), "recipe": RECIPE, "overrides": overrides, "runs": []}
    print(f"load average {record['load_average']:.1f}: numbers count on an otherwise idle machine", flush=True)
    for later, seed in enumerate(SEEDS[: 1 if options.quick else options.seeds]):
        record["runs"] += run(options.policies, seed, overrides, later=later)
        write_record(record, options.json)
    print_report(record["runs"])
    return 0


def shifted_trace(trace: Sequence[Sequence[int]], later: int) -> list[list[int]]:
    """Return a trace whose changes come so many steps later."""
    return [[step + later if step else 0, count] for step, count in trace]


def run(policies: Sequence[str], seed: int, overrides: Sequence[str], *, later: int) -> list[Record]:
    """Run the recipe under each policy, say what came of it in a line each, and return that.

    Args:
        later: by how many steps the devices come and go later than in the recipe.
    """
    trace = load_config(RECIPE, overrides).drift.devices
    assert isinstance(trace, tuple)
    changes = [f"seed={seed}", f"drift.devices={json.dumps(shifted_trace(trace, later))}"]
    with tempfile.TemporaryDirectory(prefix="nereus-adapt-") as folder:
        out = Path(folder) / "record.json"
        command = [sys.executable, "-m", "tests.benchmarks.adapt_run", RECIPE, folder, str(out), *policies, "--"]
        subprocess.run([*command, *overrides, *changes], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        runs: list[Record] = [{"seed": seed, **record} for record in json.loads(out.read_text())]
    for found in runs:
        summary = found["summary"] = summarize(found)
        print(
            f"seed {seed}, {found['policy']}: {summary['total_s']:.1f} s for {summary['steps']} steps, "
            f"{summary['transitions']} transitions {summary['seconds']['transition']:.2f} s, responses "
            f"{summary['growth']:.1f} times as long, waited for a core {summary['waited_share']:.1%}",
            flush=True,
        )
        found["steps"] = [{key: step[key] for key in KEPT if key in step} for step in found["steps"]]
    return runs


# Of a line of metrics.jsonl the record keeps these.
KEPT = (
    "step", "response_tokens_mean", "response_tokens_p95", "share_at_cap", "reward_mean", "rollout_tokens", "seconds",
    "predicted_s", "plan", "peak_memory_bytes", "devices_present", "rollouts_digest",
)  # fmt: skip
# Lengths at both ends of a run are means over so many steps: single ones scatter.
_ENDS = 3


def summarize(run: Mapping[str, Any]) -> Record:
    """Return what one run came to.

    `total_s` is all from the first decision to the last commit: its opening, which is the same for all, left out, and
    the others' turns. `seconds` are its parts; "recovery" is what was lost by steps that were broken off, "commit" what
    was waited for after a step, which a run of its own spends in the next step.
    """
    steps, driver = run["steps"], run["driver_s"]
    lengths = [step["response_tokens_mean"] for step in steps]
    total_s = sum(seconds for part, seconds in driver.items() if part != "open")
    parts = {
        name: sum(step["seconds"][name] for step in steps)
        for name in ("generation", "inference", "training", "weight_sync", "staging")
    }
    parts |= {part: driver[part] for part in ("transition", "decide", "commit")}
    parts["recovery"] = driver["broken_off"] + driver["recovery"]
    parts["other"] = total_s - sum(parts.values())
    predicted = [step.get("predicted_s", {}).get("current") for step in steps]
    errors = [abs(one / steady_s(step) - 1) for one, step in zip(predicted, steps, strict=True) if one]
    moves = [line for line in run["transitions"] if line["outcome"] == "committed"]
    return {
        "steps": len(steps),
        "total_s": total_s,
        "seconds": parts,
        "step_s": median(step["seconds"]["total"] for step in steps),
        "transitions": len(moves),
        "layout_transitions": sum(changes_layout(line) for line in moves),
        "transition_share": parts["transition"] / total_s,
        "growth": sum(lengths[-_ENDS:]) / sum(lengths[:_ENDS]),
        "tokens": sum(step["rollout_tokens"] for step in steps),
        "waited_share": run["waited_s"] / total_s,
        "prediction_error": median(errors) if errors else None,
    }


def steady_s(step: Mapping[str, Any]) -> float:
    """Return a step's seconds without those of a transition before it."""
    return float(step["seconds"]["total"] - step["seconds"]["transition"])


def changes_layout(line: Mapping[str, Any]) -> bool:
    """Return whether a transition has changed a tp or pp."""
    return any(
        (stage["tp"], stage["pp"]) != (line["to"][name]["tp"], line["to"][name]["pp"])
        for name, stage in line["from"].items()
    )


if __name__ == "__main__":
    sys.exit(main())
