"""Whether a run may go on with a config: what it was started with, what may change, and what must not."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.commits import Commit, live_commits
from nereus.config import ConfigError, RunConfig, build_config, override_config
from nereus.identity import compute_identity
from nereus.runtime.job import prepare_job
from storage.errors import hide_credentials
from storage.journal import DamagedJournal, Entry, Journal
from storage.urls import local_path
from storage.writable import check_writable, describe_access

__all__ = ["RecordedRun", "check_resumable", "check_resume", "compute_identity", "fit_plan", "next_step",
           "read_recorded", "staging_root"]  # fmt: skip

# What a resumed run may change: how it is executed, never what it computes.
_EXECUTION = ("cluster", "plan", "adapt", "transport", "staging.every", "staging.keep", "staging.lease_s", "drift",
              "tracking", "ppo.micro_batch", "reward.workers", "reward.timeout_s")  # fmt: skip
# Compared by what they lead to, so that a folder may have moved.
_PLACES = ("model.path", "critic.path", "reference.path", "reward.model", "data.prompts", "model.tiny.tokenizer",
           "critic.tiny.tokenizer", "reference.tiny.tokenizer", "staging.root", "run_dir")  # fmt: skip
_FIELDS = {"model": "model.path", "critic": "critic.path", "reference": "reference.path", "reward": "reward.model",
           "prompts": "data.prompts", "tokenizer": "model", "reward_tokenizer": "reward.model"}  # fmt: skip
_NEW_RUN = "or start a new run with `nereus run`"


@dataclass(frozen=True)
class RecordedRun:
    """What the newest driver of a run wrote down when it took the run over.

    Attributes:
        config: its `run_dir` is where the run lies now; relative paths count from the working directory of now.
        identity: as `compute_identity`.
        entries: of the journal, oldest first.
    """

    run_id: str
    config: RunConfig
    identity: Mapping[str, str]
    entries: tuple[Entry, ...]

    @property
    def next_step(self) -> int:
        """The step with which the run goes on."""
        return next_step(live_commits(self.entries))


def read_recorded(run_dir: str) -> RecordedRun:
    """Return what the journal of a run says of it.

    Raises:
        ValueError: there is no run in `run_dir`, it can't be read, or another version wrote it.
    """
    run_dir = run_dir.rstrip("/")
    where = hide_credentials(run_dir)
    try:
        entries = tuple(Journal(run_dir).entries())
    except DamagedJournal:
        raise
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"RUN_DIR {where} can't be read {describe_access(error)}.") from error
    newest = next((entry for entry in reversed(entries) if entry.kind == "take_over"), None)
    if newest is None:
        raise ValueError(f"RUN_DIR {where} holds no run (its journal is empty); give the directory of a run.")
    try:
        config = build_config({**newest.body["config"], "run_dir": run_dir})
        identity = {str(key): str(value) for key, value in newest.body["identity"].items()}
        return RecordedRun(str(newest.body["run_id"]), config, identity, entries)
    except ConfigError as error:
        text = f"RUN_DIR {where} was written by another version of Nereus"
        raise ValueError(f"{text} ({str(error).rstrip('.')}); use that one.") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"RUN_DIR {where}: record {newest.number} of its journal lacks {error}; restore it from a copy."
        ) from None


def next_step(commits: Sequence[Commit]) -> int:
    """Return the step with which a run goes on after the newest of its live commits; 0 where there is none."""
    return commits[-1].step + 1 if commits else 0


def check_resume(
    recorded: RunConfig, identity: Mapping[str, str], config: RunConfig, new_identity: Mapping[str, str]
) -> None:
    """Check that a run recorded with one config may go on with another.

    Execution may change: cluster, plan, adapt, transport, staging (not its root), drift, tracking, `ppo.micro_batch`,
    the reward function's processes and a larger `steps`. Places may change while their content is the same.

    Args:
        recorded, identity: of the run.
        config, new_identity: of now; without `run_dir` the config is taken to mean the recorded one.

    Raises:
        ValueError: something else differs; the message names the field, both values and the mend.
    """
    for field, before, now in _differences(recorded.model_dump(mode="json"), config.model_dump(mode="json")):
        if not _may_change(field):
            raise _changed(field, before, now)
    if config.steps < recorded.steps:
        raise ValueError(
            f"`steps` is {recorded.steps} for this run so far and {config.steps} now; a run can only be made longer: "
            f"give at least {recorded.steps}, or leave it out."
        )
    _check_places(recorded, config)
    _check_identity(recorded, identity, config, new_identity)


def _may_change(field: str) -> bool:
    return field in ("steps", *_PLACES) or any(f"{field}.".startswith(f"{key}.") for key in _EXECUTION)


def _differences(before: Any, now: Any, field: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the dotted keys whose values differ, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{field}.{key}" if field else key)
    elif before != now:
        yield field, before, now


def _changed(field: str, before: Any, now: Any) -> ValueError:
    return ValueError(
        f"`{field}` was {_show(before)} when this run was started and is {_show(now)} now; "
        f"leave it as it was, {_NEW_RUN}."
    )


def _show(value: Any) -> str:
    text = "empty" if value is None else str(value)
    return hide_credentials(text if len(text) <= 200 else text[:197] + "...")


def _check_places(recorded: RunConfig, config: RunConfig) -> None:
    run_dir = recorded.run_dir if config.run_dir is None else config.run_dir
    if _resolve(run_dir) != _resolve(recorded.run_dir):
        raise ValueError(
            f"`run_dir` is {_show(config.run_dir)}, but the run that goes on lies in {_show(recorded.run_dir)}; "
            "leave it out."
        )
    before, now = staging_root(recorded), staging_root(config.model_copy(update={"run_dir": run_dir}))
    if _resolve(before) != _resolve(now):
        raise _changed("staging.root", before, now)


def staging_root(config: RunConfig) -> str:
    """Return where a run's staged sets lie; the config's `run_dir` must be set."""
    return (config.staging.root or f"{str(config.run_dir).rstrip('/')}/state").rstrip("/")


def _resolve(url: str | None) -> str | None:
    local = None if url is None else local_path(url)
    return os.path.realpath(local) if local is not None else url and url.rstrip("/")


def _check_identity(
    recorded: RunConfig, identity: Mapping[str, str], config: RunConfig, new_identity: Mapping[str, str]
) -> None:
    for key, field in _FIELDS.items():
        before, now = identity.get(key), new_identity.get(key)
        if before == now:
            continue
        place = _show(_value_at(config, field))
        if key == "prompts":
            raise ValueError(
                f"`{field}`: the prompts in {place} are not those that this run was started with (xxh3 {_short(now)} "
                f"instead of {_short(before)}); restore the file, {_NEW_RUN}."
            )
        what = "tokenizer" if "tokenizer" in key else "model"
        if {kind for text in (before, now) for kind in ("full", "sampled") if f":{kind}:" in str(text)} > {"full"}:
            was = _show(_value_at(recorded, field))
            raise ValueError(
                f"`{field}`: the fingerprint of {place} is {_short(now)} and can't be compared with the recorded "
                f"{_short(before)}, since one covers every byte and the other a sample; give the model in {was}."
            )
        raise ValueError(
            f"`{field}`: {place} holds another {what} than the one that this run was started with (fingerprint "
            f"{_short(now)} instead of {_short(before)}); restore it, {_NEW_RUN}."
        )


def _value_at(config: RunConfig, field: str) -> Any:
    """Return the place that a field names; of a model without a path the one of the actor, or its tokenizer's."""
    if field == "data.prompts":
        return config.data.prompts
    if field == "reward.model":
        return config.reward.model
    model = getattr(config, field.split(".")[0])
    model = config.model if model.path is None and model.tiny is None else model
    return model.path if model.tiny is None else model.tiny.tokenizer


def _short(fingerprint: str | None) -> str:
    if fingerprint is None:
        return "none"
    *kind, digest = fingerprint.split(":")
    return ":".join([*kind, digest[:12]])


# The plan on the devices of now


def fit_plan(recorded: RecordedRun, config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return the config with a plan that fits the devices of now, and a note where that is not the config's own.

    A plan that was only recorded gives way to `auto`'s where it doesn't fit; one that the user has given now must fit,
    which `prepare_job` checks. Of a schedule counts what holds from the step on with which the run goes on.

    Raises:
        ValueError: something beside the plan is wrong, as `prepare_job` says.
    """
    if config.plan == "auto" or config.plan != recorded.config.plan:
        return config, None
    try:
        prepare_job(config, first_step=recorded.next_step)
        return config, None
    except ValueError as error:
        instead = config.model_copy(update={"plan": "auto"})
        prepare_job(instead)  # what is wrong beside the plan is raised as it is
        return instead, f"The recorded plan doesn't fit ({str(error).rstrip('.')}); the run goes on with `plan: auto`."


def check_resumable(run_dir: str, overrides: Iterable[str]) -> RunConfig:
    """Return the config that a run goes on with, checked as far as that is possible without being its driver.

    Args:
        overrides: dotted `key=value`, applied to what is recorded.

    Raises:
        ValueError: as `read_recorded`, `check_resume` and `prepare_job`.
    """
    run = read_recorded(run_dir)
    config = override_config(run.config, overrides)
    check_resume(run.config, run.identity, config, compute_identity(config))
    check_writable(run_dir, field="RUN_DIR")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # the run itself warns
    try:
        prepare_job(fit_plan(run, config)[0], first_step=run.next_step)
    finally:
        logging.disable(before)
    return config
