"""One run of a recipe under control, in a process of its own: where its driver's time goes, beside the run's records.

    python -m tests.benchmarks.adapt_run RECIPE RUN_DIR OUT.json [key=value ...]

The steps are those of the flow, in its order and as parallel as there, without Prefect around them.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nereus.config import load_config
from nereus.runtime.session import STEP_FAILURES, Session


class Stopwatch:
    """Seconds by what the driver was doing."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("open", "decide", "transition", "broken_off", "recovery", "steps", "finish"), 0.0)
        self.waited_s = 0.0  # of the steps, by the worker that waited longest in each

    @contextmanager
    def during(self, what: str, failed: str | None = None) -> Iterator[None]:
        """Add the block's seconds to `what`, or, if it raises, to `failed`."""
        begin = time.perf_counter()
        try:
            yield
        except BaseException:
            what = failed or what
            raise
        finally:
            self.seconds[what] += time.perf_counter() - begin


def drive(session: Session, watch: Stopwatch) -> None:
    """Run all steps, the plan under control."""
    with ThreadPoolExecutor(4) as pool:
        while (step := session.next_step) < session.config.steps:
            try:
                with watch.during("decide"):
                    session.decide(step)
                if session.transition_due(step):
                    with watch.during("transition"):
                        session.begin_transition(step)
                        outcome = session.run_transition()["outcome"]
                    if outcome != "committed":
                        continue
                before = waited_for_core_s(session)
                with watch.during("steps", failed="broken_off"):
                    run_step(session, step, pool)
                waited = waited_for_core_s(session)
                watch.waited_s += max(waited[d] - before[d] for d in waited)
            except STEP_FAILURES as error:
                with watch.during("recovery"):
                    session.make_ready(step, error)


def run_step(session: Session, step: int, pool: ThreadPoolExecutor) -> None:
    """Run one step; what the flow does at the same time is done at the same time here."""

    def together(*calls: Callable[[int], Mapping[str, Any]]) -> None:
        for future in [pool.submit(call, step) for call in calls]:
            future.result()

    session.generate(step)
    together(session.score, session.infer_reference, session.infer_logprobs, session.infer_values)
    session.estimate_advantages(step)
    together(session.train_actor, session.train_critic)
    session.sync_weights(step)
    session.finish_step(step)
    session.stage_state(step)


def waited_for_core_s(session: Session) -> dict[int, float]:
    """Return by device how long its worker was ready to run, but had no core, since it started."""
    pids = session.worker_pids()
    return {device: int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9 for device, pid in pids.items()}


def main(arguments: Sequence[str]) -> None:
    """Run, and write what it came to."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    recipe, run_dir, out, *overrides = arguments
    config = load_config(recipe, [*overrides, f"run_dir={run_dir}"])
    watch = Stopwatch()
    begin = time.perf_counter()
    with watch.during("open"):
        session = Session.open(config, run_id=Path(run_dir).name)
    with session:
        drive(session, watch)
        with watch.during("finish"):
            session.settle()
        record = {
            "wall_s": time.perf_counter() - begin,
            "driver_s": watch.seconds,
            "waited_s": watch.waited_s,
            "steps": session.read_metrics(),
            "decisions": session.read_decisions(),
            "transitions": session.read_transitions(),
        }
    Path(out).write_text(json.dumps(record))


if __name__ == "__main__":
    main(sys.argv[1:])
