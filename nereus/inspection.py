"""What a run directory or a staged set holds: commits, drivers, what was removed, and what is damaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nereus.commits import Commit, list_commits, live_commits, look_into, read_commit, reading
from nereus.resume import RecordedRun, read_recorded, staging_root
from storage.errors import describe_error, hide_credentials
from storage.journal import DamagedJournal
from storage.manifest import MANIFEST_NAME, DamagedState, Manifest
from storage.small_files import file_exists, list_names
from storage.state import read_state, verify_state
from storage.urls import join_url, open_filesystem

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class GroupReport:
    """One group of a set, which is what a model-stage keeps: its tensors, and their bytes."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class SetReport:
    """One staged set.

    Attributes:
        step: its state is that at the end of this step; None where the manifest doesn't tell.
        name: of the folder.
        written_at: ISO 8601, UTC, by the clock of the store; None where the store doesn't say.
        plan: {model-stage: {dp, tp, pp, devices, ...}} that wrote it.
        damage: what is wrong with it, in sentences.
    """

    step: int | None
    name: str
    written_at: str | None = None
    num_bytes: int = 0
    plan: Mapping[str, Any] = field(default_factory=dict)
    groups: Mapping[str, GroupReport] = field(default_factory=dict)
    policy_version: int | None = None
    damage: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        groups = {name: {"tensors": g.num_tensors, "bytes": g.num_bytes} for name, g in self.groups.items()}
        return {
            "step": self.step,
            "set": self.name,
            "written_at": self.written_at,
            "bytes": self.num_bytes,
            "policy_version": self.policy_version,
            "plan": dict(self.plan),
            "groups": groups,
            "damage": list(self.damage),
        }


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found.

    Attributes:
        kind: "run", "state" (one set) or "sets" (a folder of sets without its run).
        sets: those that can be read, oldest first; of a run those that it could go on from.
        retired: (step, name) of commits that newer ones have replaced.
        uncommitted: names of sets that no commit names: being written, or left by a killed driver.
        take_overs: {number, host, pid, flow_run_id} of each driver.
        verified: every byte was read.
    """

    where: str
    kind: str
    sets: tuple[SetReport, ...]
    run_id: str | None = None
    steps: int | None = None
    retired: tuple[tuple[int, str], ...] = ()
    uncommitted: tuple[str, ...] = ()
    take_overs: tuple[Mapping[str, Any], ...] = ()
    journal_damage: tuple[str, ...] = ()
    verified: bool = False

    @property
    def damage(self) -> tuple[str, ...]:
        """Everything that is wrong, in sentences."""
        return (*self.journal_damage, *(sentence for report in self.sets for sentence in report.damage))

    def to_record(self) -> dict[str, Any]:
        """Return what `nereus inspect --json` prints."""
        return {
            "where": hide_credentials(self.where),
            "kind": self.kind,
            "run_id": self.run_id,
            "steps": self.steps,
            "sets": [report.to_record() for report in self.sets],
            "retired": [{"step": step, "set": name} for step, name in self.retired],
            "uncommitted": list(self.uncommitted),
            "take_overs": [dict(record) for record in self.take_overs],
            "verified": self.verified,
            "damage": list(self.damage),
        }


def inspect(url: str, *, verify: bool = False, on_bytes: OnBytes | None = None) -> Inspection:
    """Return what a run directory, a staged set or a folder of sets holds.

    Args:
        url: any fsspec URL.
        verify: read every byte and check every checksum, not only the manifests.
        on_bytes: called with the bytes read since the last call, from several threads.

    Raises:
        ValueError: there is neither a run nor staged state, or it can't be read.
    """
    url = url.rstrip("/")
    names = look_into(url)
    try:
        if MANIFEST_NAME in names:
            return Inspection(url, "state", (_report_alone(url, verify, on_bytes),), verified=verify)
        if names & {"journal", "run.yaml"}:
            return _inspect_run(url, verify, on_bytes)
        sets = [name for name in _sets_of(names) if file_exists(join_url(join_url(url, name), MANIFEST_NAME))]
        reports = tuple(_report_alone(join_url(url, name), verify, on_bytes) for name in sets)
    except ValueError:
        raise
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"{hide_credentials(url)} can't be read ({describe_error(error)}).") from error
    if not reports:
        raise ValueError(
            f"{hide_credentials(url)} holds neither a run nor committed state (no {MANIFEST_NAME}); "
            "give a run's directory or the folder of a staged set."
        )
    return Inspection(url, "sets", reports, verified=verify)


def _inspect_run(run_dir: str, verify: bool, on_bytes: OnBytes | None) -> Inspection:
    try:
        run = read_recorded(run_dir)
        for _ in range(3):  # a run that goes on may retire what we are about to read
            inspection = _inspect_recorded(run_dir, run, verify, on_bytes)
            if not inspection.damage:
                break
            again = read_recorded(run_dir)
            if len(again.entries) == len(run.entries):
                break
            run = again
        return inspection
    except DamagedJournal as error:  # without it nobody knows which sets are commits
        return Inspection(run_dir, "run", (), journal_damage=(str(error),), verified=verify)


def _inspect_recorded(run_dir: str, run: RecordedRun, verify: bool, on_bytes: OnBytes | None) -> Inspection:
    root = staging_root(run.config)
    # Some object stores go on listing folders that have been emptied.
    listed = [name for name in _sets_of(list_names(root)) if list_names(join_url(root, name))]
    live = live_commits(run.entries)
    # Older ones may have been retired; of the newest that are kept each must be there.
    kept = {commit.set_name for commit in live[-run.config.staging.keep :]}
    shown = [commit for commit in live if commit.set_name in kept or _is_there(root, commit.set_name, listed)]
    reports = {commit: _report_commit(root, commit, verify, on_bytes) for commit in shown}
    # What a run that goes on has retired while we looked is no damage.
    for commit in [commit for commit, report in reports.items() if report.damage and commit.set_name not in kept]:
        if not _is_there(root, commit.set_name, listed):
            del reports[commit]
    names = {commit.set_name for commit in reports}
    return Inspection(
        run_dir,
        "run",
        tuple(reports.values()),
        run_id=run.run_id,
        steps=run.config.steps,
        retired=tuple((commit.step, commit.set_name) for commit in list_commits(run.entries)
                      if commit.set_name not in names),
        uncommitted=tuple(name for name in listed
                          if name not in {commit.set_name for commit in list_commits(run.entries)}),
        take_overs=tuple(_take_overs(run)),
        verified=verify,
    )  # fmt: skip


def _is_there(root: str, name: str, listed: Collection[str]) -> bool:
    return name in listed and file_exists(join_url(join_url(root, name), MANIFEST_NAME))


def _take_overs(run: RecordedRun) -> Iterable[dict[str, Any]]:
    for entry in run.entries:
        if entry.kind == "take_over":
            yield {"number": entry.number, **{key: entry.body.get(key) for key in ("host", "pid", "flow_run_id")}}


def _sets_of(names: Iterable[str]) -> list[str]:
    """Return which names in a staging root are those of sets; the earliest step first."""
    return sorted(name for name in names if name.startswith("step-"))


def _report_commit(root: str, commit: Commit, verify: bool, on_bytes: OnBytes | None) -> SetReport:
    return _report(join_url(root, commit.set_name), commit.step, lambda: read_commit(root, commit), verify, on_bytes)


def _report_alone(url: str, verify: bool, on_bytes: OnBytes | None) -> SetReport:
    return _report(url, None, lambda: read_state(url), verify, on_bytes)


def _report(
    url: str, step: int | None, read: Callable[[], Manifest], verify: bool, on_bytes: OnBytes | None
) -> SetReport:
    name = url.rsplit("/", 1)[-1]
    try:
        manifest = read()
        report = _describe(manifest, name, _written_at(url))
        if not verify:
            return report
        with reading(url):
            return replace(report, damage=tuple(verify_state(url, on_bytes=on_bytes)))
    except DamagedState as error:
        return SetReport(step, name, damage=(str(error),))


def _describe(manifest: Manifest, name: str, written_at: str | None) -> SetReport:
    groups = {}
    for group in manifest.groups:
        pieces = [piece for shard in manifest.shards_of(group) for piece in shard.pieces]
        num_bytes = sum(piece.stop - piece.start for piece in pieces)
        groups[group] = GroupReport(len(manifest.tensors_of(group)), num_bytes)
    version = manifest.run_state.get("policy_version")
    return SetReport(manifest.step, name, written_at, manifest.num_bytes, manifest.plan, groups, version)


def _written_at(url: str) -> str | None:
    filesystem, path = open_filesystem(join_url(url, MANIFEST_NAME))
    try:
        return filesystem.modified(path).isoformat(timespec="seconds")
    except Exception:  # not every store knows; nothing hangs on it
        return None
