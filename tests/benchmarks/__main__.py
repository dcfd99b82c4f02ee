"""Run all benchmarks in turn: `python -m tests.benchmarks [--quick] [--only NAME ...] [--model DIR]`.

Each runs in a process of its own, prints a table and writes `build/bench/NAME.json`. One that fails doesn't stop the
others, but the exit code says so.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.benchmarks.report import DEFAULT_MODEL, OUT_DIR, require_model

# Name -> arguments of a quick run.
BENCHMARKS = {
    "decode": ("--repeats", "1", "--batches", "1", "8"),
    "training": ("--quick",),
    "weight_sync": ("--quick",),
    "ppo_step": ("--quick",),
    "staged_state": ("--quick",),
    "transition": ("--quick",),
    "transition_graph": ("--quick",),
    "measuring": ("--quick",),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--model", default=DEFAULT_MODEL, help="SmolLM2 as a Hugging Face directory")
    parser.add_argument("--quick", action="store_true", help="small works, a few seconds each: no numbers to quote")
    options = parser.parse_args(arguments)
    require_model(options.model)
    OUT_DIR.mkdir(parents=True, exist_ok=True)
    print(f"load average {os.getloadavg()[0]:.1f}: numbers count on an otherwise idle machine", flush=True)
    failed = [name for name in options.only if not run(name, options.model, quick=options.quick)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, model: str, *, quick: bool) -> bool:
    """Run one benchmark; return whether it ended well."""
    out = OUT_DIR / f"{name}.json"
    command = [sys.executable, "-m", f"tests.benchmarks.{name}", "--model", model, "--json", str(out)]
    print(f"\n== {name}", flush=True)
    started = time.monotonic()
    done = subprocess.run([*command, *(BENCHMARKS[name] if quick else ())])
    print(f"{name} took {time.monotonic() - started:.0f} s; record in {out}", flush=True)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
