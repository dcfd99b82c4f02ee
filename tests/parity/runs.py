"""Whole PPO runs without Prefect, for comparing plans: tokens, parameters and metrics of each."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nereus.config import RunConfig, build_config
from nereus.model.spec import tensors
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.session import Session
from tests.runtime.steps import complete_step, prepare_step

_run_ids = itertools.count()

# Odd everywhere: 4 KV groups of 2 heads, 5 layers, an MLP of 50 and 29 tokens divide by almost nothing.
ODD_TINY = {"hidden": 64, "layers": 5, "heads": 8, "kv_heads": 4, "intermediate": 50, "vocab": 29}


def uniform_layouts(most_workers: int = 4) -> list[tuple[int, int, int]]:
    """Return all (dp, tp, pp) with at most that many workers."""
    degrees = range(1, most_workers + 1)
    return [d for d in itertools.product(degrees, repeat=3) if d[0] * d[1] * d[2] <= most_workers]


def uniform_plan(model_stages: Sequence[str], dp: int, tp: int, pp: int) -> dict[str, dict[str, int]]:
    return {name: {"dp": dp, "tp": tp, "pp": pp} for name in model_stages}


@dataclass
class Run:
    """What a run leaves: drawn tokens and whole parameters by role, and the lines of metrics."""

    tokens: list[list[list[int]]] = field(default_factory=list)
    parameters: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)


def run_job(engine: Engine, folder: Path, tree: Mapping[str, Any], plan: Any = "auto") -> Run:
    """Run a config on running workers and return what it leaves."""
    run_id = f"run{next(_run_ids)}"
    config: RunConfig = build_config({**tree, "plan": plan, "run_dir": os.fspath(folder / run_id)})
    result = Run()
    with Session.open(config, run_id=run_id, engine=engine) as session:
        for step in session.steps:
            prepare_step(session, step)
            result.tokens.append([response.tokens for response in session.rollouts.responses])
            result.metrics.append(complete_step(session, step))
        for name in ("actor.training", "critic.training", "actor.generation"):
            result.parameters[name] = read_whole(session, engine, name)
            assert_replicas_equal(session, engine, name)
    return result


def read_whole(session: Session, engine: Engine, name: str, replica: int = 0) -> dict[str, np.ndarray]:
    """Return a model-stage's whole tensors, assembled from the owned slices of one of its replicas."""
    devices = session.plan[name].replicas[replica]
    parts = run_command(engine, "read_parameters", {d: {"model_stage": name} for d in devices}, label=name, step=None)
    whole = {info.name: np.full(info.shape, np.nan) for info in tensors(session.job.sources[name].spec).values()}
    for device in devices:
        for starts, tensor, array in parts[device]:
            index = tuple(slice(start, start + size) for start, size in zip(starts, array.shape, strict=True))
            whole[tensor][index] = array
    return whole


def assert_replicas_equal(session: Session, engine: Engine, name: str) -> None:
    """Replicas apply the same sums in the same order, so they hold the same bits, on every layout."""
    first, *others = (read_whole(session, engine, name, replica) for replica in range(session.plan[name].dp))
    for replica, other in enumerate(others, 1):
        differing = [tensor for tensor, array in first.items() if array.tobytes() != other[tensor].tobytes()]
        assert not differing, f"replica {replica} of {name} differs from replica 0 in {differing}"


def largest_difference(left: Run, right: Run) -> float:
    """Return the largest absolute difference between the parameters of two runs; NaN if one lacks an element."""
    return max(
        float(np.abs(left.parameters[name][tensor] - right.parameters[name][tensor]).max())
        for name in left.parameters
        for tensor in left.parameters[name]
    )
