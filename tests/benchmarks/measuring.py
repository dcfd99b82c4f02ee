"""What measuring a step and deciding on the next one take of it.

Run `python -m tests.benchmarks.measuring [--steps N] [--quick] [--json FILE]`. The recipes run as they are, under
control; the driver does nothing else while it measures, so all of its seconds count:

    memory   a command to all workers: reads the peak and what is mapped, and begins anew; after a move one more
    learn    lengths, seconds by task and class of operations, their predictions, calibration, alarms
    predict  for the report: what the step would have taken on its plan and on the first one
    decide   devices, triggers, and the planner where one calls for it
    workers  two readings of the clock and a sum a communicator call: calls of the busiest worker times what one takes
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nereus.runtime.session as session_module
from nereus.config import load_config
from nereus.runtime.command_times import Spending
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from tests.benchmarks.report import OUT_DIR, describe_run, print_table, write_record
from tests.runtime.steps import drive

RECIPES = ("tiny-cpu", "adapt-cpu")
PARTS = ("memory", "learn", "workers", "predict", "decide")
MEASURING = PARTS[:3]


class Account:
    """Seconds of each part in the step at hand."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and adds what it took to a part."""

        def run(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.perf_counter() - begun

        return run

    def take(self) -> dict[str, float]:
        taken, self.seconds = self.seconds, dict.fromkeys(PARTS, 0.0)
        taken["learn"] -= taken["predict"]  # which it holds
        return taken


def measure(recipe: str, *, steps: int) -> dict[str, Any]:
    """Return the record of one recipe: seconds of a step and of each part, medians over its steps."""
    account, one_note = Account(), seconds_of_a_note()
    lines: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="nereus-measuring-") as folder:
        config = load_config(recipe, ["adapt.enabled=true", f"steps={steps}", f"run_dir={Path(folder) / 'run'}"])
        measured = account.timed("learn", session_module.measure_step)
        engine = LocalEngine(
            "tests.benchmarks.services:CountingRank", memory_per_device_bytes=config.cluster.memory_per_device
        )
        with (
            mock.patch.object(session_module, "measure_step", measured),
            mock.patch.object(session_module, "make_engine", return_value=engine),
            Session.open(config, run_id="measuring") as session,
        ):
            run_command, run = session._run, account.timed("memory", session._run)
            session._run = lambda label, method, *rest: (  # type: ignore[method-assign]
                run if method in ("begin_memory", "read_memory") else run_command
            )(label, method, *rest)
            session._learn = account.timed("learn", session._learn)  # type: ignore[method-assign]
            session._predict = account.timed("predict", session._predict)  # type: ignore[method-assign]
            session.decide = account.timed("decide", session.decide)  # type: ignore[method-assign]

            def note(_: int, metrics: dict[str, Any]) -> None:
                parts = account.take()
                parts["workers"] = one_note * calls_of(session)
                lines.append({"step": metrics["seconds"]["total"], **parts})

            drive(session, note)
    lines = lines[1:]  # the first one meets cold caches, everywhere
    seconds = {name: statistics.median(line[name] for line in lines) for name in ("step", *PARTS)}
    shares = [sum(line[part] for part in MEASURING) / line["step"] for line in lines]
    return {
        "recipe": recipe,
        "steps": len(lines),
        "seconds": seconds,
        "measuring_share": statistics.median(shares),
        "deciding_share": sum(line["decide"] for line in lines) / sum(line["step"] for line in lines),
    }


def calls_of(session: Session) -> int:
    """Return how many calls the busiest worker's communicators have timed since this was asked last."""
    return max(session._run("calls", "take_calls", {device: {} for device in session.plan.devices}, None).values())


def seconds_of_a_note() -> float:
    """Return what it takes to time one communicator call."""
    spending = Spending()

    def note() -> None:
        begun = time.perf_counter()
        spending.add("all_reduce", time.perf_counter() - begun, 1)

    return min(timeit.repeat(note, number=10_000, repeat=5)) / 10_000


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--model", help="taken and ignored: the models are tiny")
    parser.add_argument("--quick", action="store_true", help="four steps")
    parser.add_argument("--json", default=str(OUT_DIR / "measuring.json"), help="file to write the record to")
    options = parser.parse_args(arguments)
    head = describe_run("measuring", threads=1)
    rows = [measure(recipe, steps=4 if options.quick else options.steps) for recipe in RECIPES]
    write_record({**head, "rows": rows}, options.json)
    lines = [
        [
            row["recipe"],
            row["seconds"]["step"],
            *(1e3 * row["seconds"][part] for part in PARTS),
            f"{row['measuring_share']:.2%}",
            f"{row['deciding_share']:.2%}",
        ]
        for row in rows
    ]
    columns = ["recipe", "step s", *(f"{part} ms" for part in PARTS), "measuring", "deciding"]
    print_table(
        "Medians of a step, and the share of it that measuring (goal: below 1%) and deciding take", columns, lines
    )


if __name__ == "__main__":
    main()
