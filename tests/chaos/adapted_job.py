"""A run under control as a process of its own, to which much happens: `python -m tests.chaos.adapted_job SPEC.json`.

It drives a session as the flow does, without the orchestrator. The product knows nothing of disturbances: this process
marks the points of the driver, and its workers are ranks that can be told to use up their memory. Ends with exit code
1 and one sentence when the run fails, and with NO_DEVICES when there is nothing it could go on with.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import nereus.runtime.engine as engine_module
import nereus.runtime.session as session_module
from nereus.config import RunConfig, build_config
from nereus.runtime.deaths import Deaths
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import NoDevices, Session
from nereus.runtime.transition import Transition
from storage.journal import FencedOff
from tests.chaos.disturbances import MOVE_POINTS, STEP_POINTS, Disturbance, Disturber
from tests.chaos.doom import wrap
from tests.chaos.job import TRANSITION_CALLS, read_live
from tests.runtime.steps import drive

NO_DEVICES = 3
MOVE_CALLS = (*TRANSITION_CALLS, (Transition, "_undo"), (Session, "_go_back"))


def main(spec_path: str) -> int:
    spec = json.loads(Path(spec_path).read_text())
    disturber = Disturber([Disturbance(**one) for one in spec["disturbances"]], spec["report"])
    mark_points(disturber)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = build_config(spec["config"])
    try:
        run(config, disturber, resume_from=config.run_dir if spec["resume"] else None, state_path=spec["state"])
    except NoDevices as error:
        print(f"no devices: {error}", file=sys.stderr)
        return NO_DEVICES
    except (RuntimeError, ValueError, FencedOff) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: RunConfig, disturber: Disturber, *, resume_from: str | None, state_path: str) -> None:
    """Run all steps that are left, and write what live memory holds in the end."""
    with Session.open(config, run_id="amber", resume_from=resume_from) as session, ThreadPoolExecutor(4) as pool:
        disturber.session = session
        try:
            drive(session, run=partial(run_at_once, pool), finish=partial(finish, state_path))
        except NoDevices:
            session.settle()
            raise
        disturber.is_over = True


def finish(state_path: str, session: Session) -> None:
    """Write what live memory holds, and end the run."""
    np.savez(state_path, **read_live(session))
    session.finish()


def run_at_once(pool: ThreadPoolExecutor, session: Session, step: int) -> dict[str, Any]:
    """Do a step as the flow does, with the same things at the same time."""
    session.generate(step)
    at_once(pool, step, session.score, session.infer_reference, session.infer_logprobs, session.infer_values)
    session.estimate_advantages(step)
    at_once(pool, step, session.train_actor, session.train_critic)
    session.sync_weights(step)
    return session.finish_step(step)


def at_once(pool: ThreadPoolExecutor, step: int, *methods: Callable[[int], Any]) -> None:
    """Wait until all have ended; of failures the one raises that says which device it was."""
    ended = [pool.submit(method, step) for method in methods]
    errors = [error for future in ended if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if getattr(error, "device", None) is not None), errors[0])


def mark_points(disturber: Disturber) -> None:
    """Mark the points of the driver, and have it notice each command that runs out of memory."""

    def make_engine(config: RunConfig) -> Engine:
        return LocalEngine(
            "tests.parity.greedy_rank:GreedyRank",
            threads_per_device=config.cluster.threads_per_device,
            memory_per_device_bytes=config.cluster.memory_per_device,
        )

    def is_point(point: str) -> Callable[[Any], Any]:
        def around(call: Any) -> Any:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                disturber.come_to(point)
                return call(*arguments, **named)

            return wrapped

        return around

    def tells(call: Any) -> Any:
        def wrapped(*arguments: Any, **named: Any) -> CommandError:
            error = call(*arguments, **named)
            if error.out_of_memory:
                disturber.note_failure(error.device, str(error))
            return error

        return wrapped

    session_module.make_engine = make_engine
    wrap(Deaths, "take_wait_s", lambda _: lambda *_: 0.1)
    wrap(engine_module, "_describe_failure", tells)
    for name in STEP_POINTS:
        wrap(Session, name, is_point(name))
    for (owner, name), point in zip(MOVE_CALLS, MOVE_POINTS, strict=True):
        wrap(owner, name, is_point(point))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
