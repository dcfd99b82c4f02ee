"""A run as a process of its own, which may be doomed: `python -m tests.chaos.job SPEC.json`.

It drives a session step by step, as the flow does, without the orchestrator, and leaves the state of its live tensors
in a file. The product knows nothing of dooms: this process wraps functions of the driver, and its workers are
`DoomedRank`s. Ends with exit code 1 and one sentence when the run fails.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import nereus.runtime.session as session_module
import nereus.runtime.staged_steps as staged_steps_module
import nereus.runtime.staging as staging_module
from nereus.config import RunConfig, build_config
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.run_dir import RunDir
from nereus.runtime.session import Session
from nereus.runtime.transition import Transition
from nereus.staged_state import STAGED, staged_shapes
from storage import exclusive, records, retention
from storage.journal import FencedOff, Journal
from storage.owner import Owner
from tests.chaos.doom import TRANSITION_MOMENTS, Doom, Reaper, wrap
from tests.runtime.steps import run_step

# What the driver does at each of TRANSITION_MOMENTS.
TRANSITION_CALLS = (
    (Session, "_plan_move"),
    (Transition, "_prepare"),
    (Transition, "run_primitive"),
    (Transition, "_verify"),
    (Session, "_journal_transition"),
    (Transition, "_put_in_force"),
    (Session, "_adopt"),
    (Session, "_leave_unused"),
    (Transition, "discard_sets"),
    (RunDir, "append_transition"),
)


def main(spec_path: str) -> int:
    spec = json.loads(Path(spec_path).read_text())
    doom = None if spec["doom"] is None else Doom(**spec["doom"])
    reaper = Reaper(doom, driver=os.getpid(), report=spec["report"])
    reaper.announce()
    mark_driver(reaper)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    config = build_config(spec["config"])
    try:
        run(config, reaper, resume_from=config.run_dir if spec["resume"] else None, state_path=spec["state"])
    except (RuntimeError, ValueError, FencedOff) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


def run(config: RunConfig, reaper: Reaper, *, resume_from: str | None, state_path: str) -> None:
    """Run all steps that are left, each committed, and write what live memory holds in the end."""
    with reaper.around("start", lambda: Session.open(config, run_id="amber", resume_from=resume_from)) as session:
        while (step := session.next_step) < config.steps:
            if session.transition_due(step):
                session.begin_transition(step)
                session.run_transition()
                continue
            run_step(session, step)
            session.stage_state(step)
        np.savez(state_path, **read_live(session))
        session.finish()


def read_live(session: Session) -> dict[str, np.ndarray]:
    """Return all parameters and moments as whole arrays by `group:name`, from the first replica's live tensors."""
    whole = {}
    for name in STAGED:
        devices = session.plan[name].replicas[0]
        kwargs = {device: {"model_stage": name} for device in devices}
        parts = run_command(session._engine, "read_state", kwargs, label=name, step=None)
        dtype, shapes = parts[devices[0]][0][2].dtype, staged_shapes(session.job.specs[name])
        arrays = {tensor: np.full(shape, np.nan, dtype) for tensor, shape in shapes.items()}
        for device in devices:
            for starts, tensor, array in parts[device]:
                place = tuple(slice(start, start + size) for start, size in zip(starts, array.shape, strict=True))
                arrays[tensor][place] = array
        whole |= {f"{name}:{tensor}": array for tensor, array in arrays.items()}
    return whole


def mark_driver(reaper: Reaper) -> None:
    """Make the workers doomable, and mark the points of the driver's moments."""

    def make_engine(config: RunConfig) -> Engine:
        engine = LocalEngine(
            "tests.chaos.service:DoomedRank",
            threads_per_device=config.cluster.threads_per_device,
            memory_per_device_bytes=config.cluster.memory_per_device,
        )
        reaper.find_worker = lambda device: engine.pids().get(device)
        return engine

    def is_moment(moment: str) -> Any:
        def around(call: Any) -> Any:
            return lambda *arguments, **named: reaper.around(moment, lambda: call(*arguments, **named))

        return around

    session_module.make_engine = make_engine
    wrap(staging_module, "commit_state", is_moment("manifest write"))
    wrap(Journal, "append", is_moment("journal record"))
    wrap(staging_module, "retire", is_moment("retention"))
    wrap(RunDir, "append_metrics", is_moment("metrics"))
    for (owner, name), moment in zip(TRANSITION_CALLS, TRANSITION_MOMENTS, strict=True):
        wrap(owner, name, is_moment(moment))
    mark_parts(reaper)


def mark_parts(reaper: Reaper) -> None:
    """Mark the small parts that the driver's work consists of."""
    creations = ("manifest write", "journal record")

    def ends_part(moment: str) -> Any:
        def around(call: Any) -> Any:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                result = call(*arguments, **named)
                reaper.part(moment)
                return result

            return wrapped

        return around

    def link(call: Any) -> Any:
        def wrapped(source: str, target: str) -> None:  # one part before the name is there, and one after
            reaper.part(*creations)
            call(source, target)
            reaper.part(*creations)

        return wrapped

    def replace(call: Any) -> Any:
        def wrapped(source: str, target: str) -> None:  # a temporary file is complete and hasn't got its name
            reaper.part("start")
            call(source, target)

        return wrapped

    def put(call: Any) -> Any:
        return lambda *arguments: reaper.while_remote((*creations, "metrics"), lambda: call(*arguments))

    def torn(call: Any) -> Any:
        def wrapped(fd: int, data: bytes) -> None:
            call(fd, data[: len(data) // 2])
            reaper.part("metrics")
            call(fd, data[len(data) // 2 :])

        return wrapped

    wrap(os, "link", link)
    wrap(os, "replace", replace)
    wrap(exclusive, "create_object", put)
    wrap(records, "create_object", put)
    wrap(records, "_write_all", torn)
    wrap(Owner, "check", ends_part("metrics"))
    wrap(retention, "remove_file", ends_part("retention"))
    for owner, name in (
        (Journal, "append"),
        (RunDir, "write_config"),
        (staged_steps_module, "build_model_stages"),
        (staged_steps_module, "restore_newest"),
        (RunDir, "cut_back"),
    ):
        wrap(owner, name, ends_part("start"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
