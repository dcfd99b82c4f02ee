"""What a step of SmolLM2 sees of staging: steps that run beside the commit of the one before, against steps alone."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from nereus.config import load_config
from nereus.runtime.session import Session
from tests.runtime.steps import run_step

WARM_UP = 2
QUICK = ("rollout.prompts_per_step=2", "rollout.max_response_tokens=4")


def measure_pause(model: str, folder: str, *, pairs: int, quick: bool) -> dict[str, Any]:
    """Return the seconds of steps in turn with and without a commit under way, in one session of recipe smollm2-135m.

    Responses have the full length, so that all steps do the same work. `slower`: how much longer a step with a commit
    beside it takes, as a fraction; `paused`: what of it the step itself waited for staging.
    """
    with tempfile.TemporaryDirectory(dir=folder) as place:
        overrides = [
            f"model.path={model}",
            f"run_dir={place}/run",
            f"steps={WARM_UP + 2 * pairs}",
            "rollout.stop_at_eos=false",
            *(QUICK if quick else ()),
        ]
        with Session.open(load_config("smollm2-135m", overrides), run_id="pause") as session:
            steps = [_time_step(session, step) for step in session.steps]
    counted = steps[WARM_UP:]
    alone, beside = ([s for s in counted if s["staged"] is flag] for flag in (False, True))
    medians = {
        name: statistics.median(step["total_s"] for step in group)
        for name, group in (("alone", alone), ("beside", beside))
    }
    waits = statistics.median(s["staging_s"] for s in beside)
    return {
        "seconds": {**medians, "waited": waits},
        "slower": medians["beside"] / medians["alone"] - 1,
        "paused": waits / medians["beside"],
        "steps": steps,
    }


def _time_step(session: Session, step: int) -> Mapping[str, Any]:
    """Run a step; after every other one begin to commit its state. An odd step is the one beside a commit.

    A commit that outlasts its step delays the next one in a run that stages each: the wait counts.
    """
    staging = session._staging
    assert staging is not None
    begun = time.perf_counter()
    metrics = run_step(session, step)
    ran_s = time.perf_counter() - begun
    staging.wait()
    total_s = time.perf_counter() - begun
    is_staged = step % 2 == 1
    if not is_staged:
        begun = time.perf_counter()
        session.stage_state(step)
        begin_s = time.perf_counter() - begun
    else:
        begin_s = 0.0
    waited_s = metrics["seconds"]["staging"] + total_s - ran_s
    return {"step": step, "staged": is_staged, "total_s": total_s, "staging_s": waited_s, "begin_s": begin_s}
