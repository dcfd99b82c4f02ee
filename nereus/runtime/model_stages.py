"""Bringing a run's model-stages to life on running workers: built, and filled from their source or from a commit."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nereus.commits import Commit, read_commit
from nereus.plan import Plan
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.job import Job
from nereus.runtime.rank_state import Counters, Restored
from nereus.runtime.training import LossSettings, OptimizerSettings
from nereus.runtime.transition_orders import BuildOrder
from nereus.staged_state import STAGED
from storage.errors import hide_credentials
from storage.manifest import DamagedState, Manifest
from storage.urls import join_url

logger = logging.getLogger(__name__)

# Epochs count attempts to connect a set of communicators; a number never returns in this process.
_epochs = itertools.count()


def build_model_stages(engine: Engine, job: Job, plan: Plan, *, from_source: bool) -> None:
    """Connect and allocate all model-stages, and load the weights of those that don't come from a commit.

    Args:
        from_source: whether training begins with the source's weights; else `restore_newest` follows.
    """
    epoch = next_epoch()
    for name in plan:
        order = build_order(job, plan, name, epoch, from_source)
        _run(engine, name, "build", {device: {"order": order} for device in plan[name].devices})
    training, generation = plan["actor.training"], plan["actor.generation"]
    devices = sorted({*training.devices, *generation.devices})
    link = {"epoch": epoch, "training": training, "generation": generation}
    _run(engine, "actor.generation", "connect_sync", dict.fromkeys(devices, link))


def next_epoch() -> int:
    """Return a number that no other attempt to connect communicators has or will have in this process."""
    return next(_epochs)


def build_order(job: Job, plan: Plan, name: str, epoch: int, from_source: bool) -> BuildOrder:
    """Return what the workers need to know to build their ranks of a model-stage."""
    config, ppo = job.config, job.config.ppo
    return BuildOrder(
        model_stage=name,
        plan=plan[name],
        epoch=epoch,
        source=job.sources[name],
        dtype=getattr(torch, config.precision),
        optimizer=OptimizerSettings(ppo.betas, ppo.eps, ppo.weight_decay, ppo.grad_clip),
        loss=LossSettings(ppo.clip, ppo.value_clip, config.rollout.temperature),
        from_source=from_source,
    )


def restore_newest(
    engine: Engine, plan: Plan, root: str, commits: Iterable[Commit], run_id: str
) -> tuple[Commit, Manifest]:
    """Fill the training model-stages from the newest commit that is whole; return it with its manifest.

    Every byte is checked while it is read. Damage that shows only then falls back to the commit before as well.

    Args:
        root: folder of the staged sets.
        commits: by step.

    Raises:
        ValueError: none is whole.
    """
    damage = ""
    for commit in reversed(list(commits)):
        url = join_url(root, commit.set_name)
        try:  # nobody but us may retire it meanwhile
            manifest = read_commit(root, commit)
            _check_fits(manifest, run_id)
            _restore(engine, plan, url, manifest)
        except DamagedState as error:
            damage = damage or str(error).rstrip(".")
            logger.info("step %d: %s", commit.step, error)
            continue
        if damage:
            logger.warning("%s. The run goes on from step %d, the newest commit that is whole.", damage, commit.step)
        return commit, manifest
    raise ValueError(f"no commit in {hide_credentials(root)} is whole ({damage}); start a new run.")


def _check_fits(manifest: Manifest, run_id: str) -> None:
    if manifest.run_id != run_id:
        raise DamagedState(f"the set of step {manifest.step} belongs to run {manifest.run_id!r}, not to {run_id!r}.")


def _restore(engine: Engine, plan: Plan, folder: str, manifest: Manifest) -> None:
    """Raises DamagedState when a rank found its bytes damaged; its tensors are garbage then."""
    for name in STAGED:
        counters = Counters(**manifest.run_state["counters"][name])
        arguments = {
            "model_stage": name,
            "folder": folder,
            "shards": manifest.shards_of(name),
            "counters": counters,
        }
        results: dict[int, Restored] = _run(engine, name, "restore", dict.fromkeys(plan[name].devices, arguments))
        for restored in results.values():
            if restored.damage is not None:
                raise DamagedState(restored.damage)


def _run(engine: Engine, label: str, method: str, kwargs: Mapping[int, Mapping[str, Any]]) -> dict[int, Any]:
    return run_command(engine, method, kwargs, label=label, step=None)
