"""Runs of a recipe under several policies, a step of each in turn: where their drivers' time goes, beside the records.

    python -m tests.benchmarks.adapt_run RECIPE FOLDER OUT.json POLICY ... -- [key=value ...]

The steps are those of the flow, in its order and as parallel as there, without Prefect around them. While one run has
its turn the others stand still, with their commits at an end, and their clocks too.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nereus.config import load_config
from nereus.runtime.session import STEP_FAILURES, Session


class Stopwatch:
    """Seconds by what the driver was doing."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(("open", "decide", "transition", "broken_off", "recovery", "steps", "commit"), 0.0)
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


def drive(session: Session, watch: Stopwatch, pool: ThreadPoolExecutor) -> Iterator[None]:
    """Run all steps, the plan under control; after each step it is another run's turn."""
    session._clock.started_s = time.perf_counter()  # while others were opened, its clock stood still too
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
            continue
        with watch.during("commit"):
            session.settle()
        stopped = time.perf_counter()
        yield
        session._clock.started_s += time.perf_counter() - stopped


def take_turns(drives: Iterable[Iterator[None]]) -> None:
    """Run a step of each in turn until all have ended; who was first is last in the next round."""
    left = list(drives)
    while left:
        left = [drive for drive in left if next(drive, _ENDED) is not _ENDED]
        left = [*left[1:], *left[:1]]


_ENDED = object()


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
    """Run, and write what each policy came to."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    recipe, folder, out, *names = arguments
    policies, overrides = names[: names.index("--")], names[names.index("--") + 1 :]
    watches = {policy: Stopwatch() for policy in policies}
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(4))
        sessions: dict[str, Session] = {}
        for policy, watch in watches.items():
            config = load_config(recipe, [*overrides, f"adapt.policy={policy}", f"run_dir={folder}/{policy}"])
            with watch.during("open"):
                sessions[policy] = stack.enter_context(Session.open(config, run_id=policy))
        take_turns(drive(session, watches[policy], pool) for policy, session in sessions.items())
        records = [
            {
                "policy": policy,
                "driver_s": watches[policy].seconds,
                "waited_s": watches[policy].waited_s,
                "steps": session.read_metrics(),
                "decisions": session.read_decisions(),
                "transitions": session.read_transitions(),
            }
            for policy, session in sessions.items()
        ]
    Path(out).write_text(json.dumps(records))


if __name__ == "__main__":
    main(sys.argv[1:])
