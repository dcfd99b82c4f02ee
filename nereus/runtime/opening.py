"""How a run is opened: begun in a free directory or gone on with, by one driver at a time."""

from __future__ import annotations

import json
import logging
import os
import socket
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from nereus.commits import Commit, live_commits
from nereus.config import RunConfig
from nereus.resume import RecordedRun, check_resume, compute_identity, fit_plan, next_step, read_recorded, staging_root
from nereus.runtime.job import Job, prepare_job
from nereus.runtime.run_dir import RunDir
from storage.errors import hide_credentials
from storage.exclusive import create_exclusively
from storage.journal import Journal
from storage.owner import Owner, RunExists
from storage.small_files import read_file, remove_file
from storage.urls import join_url, local_path
from storage.writable import check_writable

logger = logging.getLogger(__name__)

# The file by which a run holds a staging root of its own.
_CLAIM = "run.json"


@dataclass
class OpenRun:
    """A run that this process drives.

    Attributes:
        run_id: as it was when the run was begun.
        commits: what a run that goes on may go on from, by step; None for a new run.
        staging_root: where its staged sets lie.
        holds_root: whether it has a claim on a root of its own.
        plan_is_new: whether a run that goes on was given another plan than it had.
    """

    run_id: str
    job: Job
    identity: dict[str, str]
    run_dir: RunDir
    owner: Owner
    staging_root: str
    commits: tuple[Commit, ...] | None
    holds_root: bool = False
    plan_is_new: bool = False

    @property
    def is_new(self) -> bool:
        return self.commits is None

    def close(self) -> None:
        """Give the run up in good order."""
        self.owner.close()

    def undo(self) -> None:
        """Leave nothing behind of a new run whose start failed: the mended config may use its directory."""
        if self.is_new:  # forgotten while it is ours: after that the directory may be another run's
            with suppress(Exception):  # a store that is gone must not hide why the start failed
                self.owner.check()
                if self.holds_root:
                    remove_file(join_url(self.staging_root, _CLAIM))
                self.run_dir.forget()
        self.close()


def open_run(config: RunConfig, *, run_id: str, flow_run_id: str | None, resume_from: str | None) -> OpenRun:
    """Check everything at the door and become the driver of the run.

    It goes on where `resume_from` names a run, or where the run directory holds one that this very flow run has begun.
    A form hands an empty `resume_from` over as "".

    Raises:
        ValueError: the config can't run, the directory holds another run, or another driver has it.
    """
    url = (resume_from or config.run_dir or os.path.join("runs", run_id)).rstrip("/")
    check_writable(url)  # first: it is quick to say that a store can't be reached
    if config.staging.root is not None:
        check_writable(config.staging.root, field="staging.root")
    recorded = read_recorded(url) if resume_from or _is_own(url, flow_run_id) else None
    if recorded is None:
        return _open_new(config.model_copy(update={"run_dir": url}), run_id, flow_run_id)
    return _open_again(config, recorded, url, flow_run_id)


def _is_own(url: str, flow_run_id: str | None) -> bool:
    """Return whether a driver of the run in a directory, if there is one, worked for this flow run."""
    if flow_run_id is None:
        return False
    try:
        entries = Journal(url).entries()
    except ValueError:
        raise
    except Exception as error:  # every store has errors of its own
        raise RunDir(url).unusable("read", error) from error
    return any(entry.kind == "take_over" and entry.body.get("flow_run_id") == flow_run_id for entry in entries)


def _open_new(config: RunConfig, run_id: str, flow_run_id: str | None) -> OpenRun:
    job = prepare_job(config)
    identity = compute_identity(config)
    assert config.run_dir is not None
    run_dir, root = RunDir(config.run_dir), _absolute(staging_root(config))
    run_dir.check_free()
    claim = uuid.uuid4().hex
    try:
        run_dir.note_before()
        body = _take_over_body(run_id, flow_run_id, config, identity, claim)
        owner = Owner.take_over(run_dir.url, body, lease_s=config.staging.lease_s, new=True)
    except RunExists:
        raise run_dir.taken() from None
    except OSError as error:
        raise run_dir.unusable("written", error) from error
    run = OpenRun(run_id, job, identity, run_dir, owner, root, None)
    with ExitStack() as undo:
        undo.callback(run.undo)
        _settle_in(run, claim)
        undo.pop_all()
    return run


def _open_again(config: RunConfig, recorded: RecordedRun, url: str, flow_run_id: str | None) -> OpenRun:
    identity = compute_identity(config)
    check_resume(recorded.config, recorded.identity, config, identity)
    config = config.model_copy(update={"run_dir": url})  # recorded as it is: its plan may fit again another time
    fitting, note = fit_plan(recorded, config)
    if note is not None:
        logger.warning(note)
    job, run_dir = prepare_job(fitting, first_step=recorded.next_step), RunDir(url)
    newest = next(entry for entry in reversed(recorded.entries) if entry.kind == "take_over")
    claim = newest.body.get("staging_claim", "")
    body = _take_over_body(recorded.run_id, flow_run_id, config, identity, claim)
    try:
        owner = Owner.take_over(url, body, lease_s=config.staging.lease_s, new=False)
    except OSError as error:
        raise run_dir.unusable("written", error) from error
    commits = live_commits(owner.journal.entries())
    job = job.begin_at(next_step(commits))  # another driver may have got further in the meantime
    root, plan_is_new = _absolute(staging_root(config)), _is_new_plan(config, recorded)
    run = OpenRun(recorded.run_id, job, identity, run_dir, owner, root, commits, plan_is_new=plan_is_new)
    with ExitStack() as undo:
        undo.callback(run.undo)
        _settle_in(run, claim)
        undo.pop_all()
    return run


def _is_new_plan(config: RunConfig, recorded: RecordedRun) -> bool:
    """Return whether a config names another plan than the run had when it made its newest commit."""
    commits = live_commits(recorded.entries)
    if not commits:
        return False
    drivers = (entry for entry in reversed(recorded.entries) if entry.kind == "take_over")
    committed_by = next(entry for entry in drivers if entry.number < commits[-1].number)
    return bool(config.model_dump(mode="json")["plan"] != committed_by.body["config"].get("plan"))


def _settle_in(run: OpenRun, claim: str) -> None:
    """Claim the staging root and write run.yaml."""
    try:
        _claim_root(run, claim)
        run.run_dir.write_config(run.job.config)
    except ValueError:
        raise
    except Exception as error:  # every store has errors of its own
        raise run.run_dir.unusable("written", error) from error


def _take_over_body(
    run_id: str, flow_run_id: str | None, config: RunConfig, identity: dict[str, str], claim: str
) -> dict[str, Any]:
    return {
        "run_id": run_id,
        "flow_run_id": flow_run_id,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "config": config.model_dump(mode="json"),
        "identity": identity,
        "staging_claim": claim,
    }


def _absolute(url: str) -> str:
    """Return a place that means the same in every process, whatever its working directory."""
    path = local_path(url)
    return url if path is None else os.path.abspath(path)


def _claim_root(run: OpenRun, claim: str) -> None:
    """Make a staging root that was named in the config this run's alone: retention removes what isn't the run's own."""
    if run.job.config.staging.root is None:
        return
    url = join_url(run.staging_root, _CLAIM)
    try:
        create_exclusively(url, json.dumps({"claim": claim, "run_dir": hide_credentials(run.run_dir.url)}).encode())
        run.holds_root = True
        return
    except FileExistsError:
        found = _read_claim(url)
    if found.get("claim") != claim:
        raise ValueError(
            f"staging.root: {hide_credentials(run.staging_root)} holds the staged state of another run, "
            f"{found.get('run_dir', 'which its ' + _CLAIM + ' does not name')}; choose another directory."
        )


def _read_claim(url: str) -> dict[str, Any]:
    """Return what a claim says; nothing where it is none of ours, or damaged."""
    try:
        found = json.loads(read_file(url))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
