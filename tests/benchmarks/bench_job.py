"""Workers that hold SmolLM2's training (and generation) model-stage, without the rest of a PPO run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nereus.config import build_config
from nereus.runtime.engine import run_command
from nereus.runtime.job import Job, prepare_job
from nereus.runtime.local import LocalEngine
from nereus.runtime.training import LossSettings, OptimizerSettings
from nereus.runtime.transition_orders import BuildOrder

SERVICE = "tests.benchmarks.services:BenchRank"
_epochs = itertools.count()


class Workers:
    """Running workers and the job whose model-stages they hold."""

    def __init__(self, engine: LocalEngine, job: Job) -> None:
        self.engine, self.job = engine, job

    def run(self, method: str, kwargs: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
        return run_command(self.engine, method, kwargs, label=method, step=None)

    def build(self, names: Sequence[str]) -> int:
        """Build model-stages of the job's plan, with their weights; return the epoch of their communicators."""
        epoch = next(_epochs)
        for name in names:
            order = BuildOrder(
                model_stage=name,
                plan=self.job.plan[name],
                epoch=epoch,
                source=self.job.sources[name],
                dtype=getattr(torch, self.job.config.precision),
                optimizer=OptimizerSettings((0.9, 0.999), 1e-5, 0.0, 1.0),
                loss=LossSettings(0.2, 0.2, 1.0),
            )
            self.run("build", {device: {"order": order} for device in self.job.plan[name].devices})
        return epoch


@contextmanager
def open_workers(
    model: str | Mapping[str, Any], *, devices: int, threads: int, gib: int, service: str = SERVICE, **tree: Any
) -> Iterator[Workers]:
    """Start `devices` workers of `threads` threads and `gib` GiB each for a run config that is given by its parts.

    The model is a directory, or what the config holds under its key.
    """
    source = {"path": model} if isinstance(model, str) else model
    cluster = {"devices": devices, "threads_per_device": threads, "memory_per_device": f"{gib}GiB"}
    job = prepare_job(build_config({"model": source, "cluster": cluster, **tree}))
    with LocalEngine(service, threads_per_device=threads, memory_per_device_bytes=gib << 30) as engine:
        engine.start(range(devices))
        yield Workers(engine, job)


def pin_to_cores(threads: int) -> None:
    """Keep this process, and the workers that it will start, on as many cores as there are threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
