"""Executes plans for real: the steps of a run as the flow takes them, and what was measured of each."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nereus.config import RunConfig, load_config
from nereus.controller.decision import StepOutcome
from nereus.runtime.engine import Engine
from nereus.runtime.session import Session
from tests.benchmarks.cost_cases import CostSetting, Entries

# A step in which a worker waited longer than this share of it for a core was disturbed by other work on the machine:
# it is run again, up to so many times as many steps as are asked for; then those disturbed least count.
_MOST_WAITED_SHARE = 0.03
_MOST_STEPS_FACTOR = 4
# Seconds after which no step is run again.
_LONG_ENOUGH_S = 15.0


def setting_config(setting: CostSetting, run_dir: str, plan: Entries) -> RunConfig:
    """Return the config of a run in a setting, on a plan."""
    return load_config(setting.recipe, [*setting.overrides, f"run_dir={run_dir}", f"plan={json.dumps(plan)}"])


def execute(setting: CostSetting, name: str, plan: Entries, engine: Engine) -> dict[str, Any]:
    """Run a plan on new workers, and return what was measured of its steps, the first one left out."""
    devices = sorted(engine.pids())
    engine.release(devices)  # a heap keeps the holes that other plans have left; a job begins without
    engine.start(devices)
    with tempfile.TemporaryDirectory() as folder:
        config = setting_config(setting, f"{folder}/run", plan)
        with Session.open(config, run_id=uuid.uuid4().hex, engine=engine) as session:
            steps = _run_steps(session, setting.steps)
            record = session.plan.to_record()
            prompt_tokens = _prompt_tokens(session)
    return {
        "setting": setting.name,
        "recipe": setting.recipe,
        "overrides": list(setting.overrides),
        "calibrates": setting.calibrates,
        "plan_name": name,
        "plan": record,
        "prompt_tokens": prompt_tokens,
        "steps": steps[1:],
        "first_peaks": steps[0]["outcome"]["peak_bytes"],
    }


def _prompt_tokens(session: Session) -> float:
    return statistics.mean(len(prompt.token_ids) for prompt in session.job.prompts)


def _run_steps(session: Session, count: int) -> list[dict[str, Any]]:
    """Run a step to warm up, then until so many were undisturbed; return the first and these."""
    first = _run_step(session, 0)
    steps: list[dict[str, Any]] = []
    begun = time.monotonic()
    while sum(map(_is_undisturbed, steps)) < count and len(steps) < _MOST_STEPS_FACTOR * count:
        if len(steps) >= count and time.monotonic() - begun > _LONG_ENOUGH_S:
            break
        steps.append(_run_step(session, 1 + len(steps)))
    return [first, *sorted(steps, key=_waited_share)[:count]]


def _waited_share(step: Mapping[str, Any]) -> float:
    return float(step["waited_s"] / step["seconds"]["total"])


def _is_undisturbed(step: Mapping[str, Any]) -> bool:
    return _waited_share(step) <= _MOST_WAITED_SHARE


def _waited_s(session: Session) -> dict[int, float]:
    """Return by device how long its worker's main thread was ready to run, but had no core, since its start."""
    return {d: int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
            for d, pid in session.worker_pids().items()}  # fmt: skip


def _run_step(session: Session, step: int) -> dict[str, Any]:
    """Run one step: what the flow does at the same time is done at the same time here."""
    before = _waited_s(session)
    session.generate(step)
    _together(step, session.score, session.infer_reference, session.infer_logprobs, session.infer_values)
    session.estimate_advantages(step)
    _together(step, session.train_actor, session.train_critic)
    session.sync_weights(step)
    times = session._clock.times  # of the step in flight; the next one has others
    metrics = session.finish_step(step)
    session.stage_state(step)
    assert session.outcome is not None
    return {
        "seconds": metrics["seconds"],
        "outcome": json.loads(json.dumps(asdict(session.outcome))),
        "own_s": {task: {d: one.own_s for d, one in times.of_task(task).items()} for task in times.tasks()},
        "waited_s": max(after - before[device] for device, after in _waited_s(session).items()),
    }


def read_outcome(record: Mapping[str, Any]) -> StepOutcome:
    """Return the outcome that a record holds."""
    devices = {"peak_bytes": {int(device): peak for device, peak in record["peak_bytes"].items()}}
    equal = {"equal_work_s": [{int(d): s for d, s in one.items()} for one in record["equal_work_s"]]}
    return StepOutcome(**{**record, **devices, **equal, "out_of_memory": tuple(record["out_of_memory"])})


def _together(step: int, *calls: Callable[[int], Mapping[str, Any]]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for future in [pool.submit(call, step) for call in calls]:
            future.result()
