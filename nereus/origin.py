"""Where a copy comes from: a staged set, the newest intact commit of a run, or a Hugging Face checkpoint."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from nereus.commits import live_commits, look_into, read_commit, reading
from nereus.identity import checkpoint_of, parse_spec, tokenizer_of
from nereus.model.checkpoint import has_value_head, read_config, read_spec
from nereus.model.fingerprint import fingerprint
from nereus.model.spec import Head, ModelSpec
from nereus.resume import read_recorded, staging_root
from nereus.tensor_source import HuggingFaceSource, StateSource, TensorSource
from storage.errors import hide_credentials
from storage.manifest import MANIFEST_NAME, DamagedState, Manifest
from storage.state import read_state
from storage.urls import join_url

T = TypeVar("T")
Role = Literal["actor", "critic"]
GROUPS = {"actor": "actor.training", "critic": "critic.training"}
SPECS = {"actor": "model", "critic": "critic"}  # a role's name in a run config


@dataclass(frozen=True)
class Origin:
    """What is copied: groups of tensors with their models, and what a manifest says beside them."""

    where: str
    sources: Mapping[str, TensorSource]
    specs: Mapping[str, ModelSpec]
    run_id: str
    step: int
    run_state: dict[str, Any]
    plan: dict[str, Any]
    config_from: Mapping[str, str | None]  # by role
    tokenizer_from: str | None
    notes: tuple[str, ...] = ()


class NoCommit(ValueError):
    """A run has no commit, or not the one asked for, or none that is whole."""


def copy_from(url: str, copy: Callable[[Origin], T], *, step: int | None = None) -> T:
    """Return what `copy` returns for what lies in a folder; while it runs, the folder is kept from being retired.

    Of a run the commits are tried, newest first, until one turns out to be whole.

    Args:
        copy: raises DamagedState where it finds damage, and leaves nothing behind then.
        step: of the commit of a run; None means the newest.

    Raises:
        NoCommit: see there.
        DamagedState: a set that was named alone is damaged.
        ValueError: the folder holds nothing that can be copied.
    """
    names = look_into(url)
    if MANIFEST_NAME in names:
        with reading(url):
            return copy(_origin_of_state(url, read_state(url), {}))
    if "journal" in names:
        return _copy_from_run(url, copy, step)
    if "config.json" in names:
        with ExitStack() as stack:
            return copy(_origin_of_checkpoint(url, stack))
    raise ValueError(
        f"{hide_credentials(url)} holds neither staged state ({MANIFEST_NAME}), nor a run (journal/), nor a Hugging "
        "Face checkpoint (config.json); give the folder of one of them."
    )


def _copy_from_run(run_dir: str, copy: Callable[[Origin], T], step: int | None) -> T:
    run = read_recorded(run_dir)
    root, commits = staging_root(run.config), live_commits(run.entries)
    folders = {role: checkpoint_of(run.config, SPECS[role]) for role in GROUPS}
    notes: list[str] = []
    for commit in reversed([commit for commit in commits if step in (None, commit.step)]):
        url = join_url(root, commit.set_name)
        with reading(url):
            try:
                origin = _origin_of_state(url, read_commit(root, commit), run.identity)
                tokenizer = tokenizer_of(run.config)
                return copy(replace(origin, config_from=folders, tokenizer_from=tokenizer, notes=tuple(notes)))
            except DamagedState as error:
                notes.append(str(error))
    raise _no_commit(run_dir, [commit.step for commit in commits], step, notes)


def _no_commit(run_dir: str, steps: Sequence[int], step: int | None, damage: Sequence[str]) -> NoCommit:
    where = hide_credentials(run_dir)
    if damage:
        return NoCommit(f"{where} holds no {'commit' if step is None else f'step {step}'} that is intact: {damage[0]}")
    if step is not None and steps:
        return NoCommit(f"{where} has no commit of step {step}; those it has are of {', '.join(map(str, steps))}.")
    return NoCommit(f"{where} holds no commit yet; wait for the end of its first step.")


def _origin_of_state(url: str, manifest: Manifest, identity: Mapping[str, str]) -> Origin:
    where = hide_credentials(url)
    identity = identity or manifest.run_state.get("identity", {})
    specs = {}
    for group in manifest.groups:
        role = next((role for role, name in GROUPS.items() if name == group), None)
        if role is None:
            raise ValueError(
                f"{where} holds the group {group[:100]}, which this version doesn't know; use a newer one."
            )
        text = identity.get(f"{SPECS[role]}.spec")
        if not isinstance(text, str):
            raise ValueError(f"{where} doesn't say of what model {group} is; give the directory of its run.")
        specs[group] = parse_spec(text)
    sources = {group: StateSource(url, manifest, group) for group in specs}
    state, plan = manifest.run_state, manifest.plan
    return Origin(where, sources, specs, manifest.run_id, manifest.step, state, plan, dict.fromkeys(GROUPS), None)


def _origin_of_checkpoint(url: str, stack: ExitStack) -> Origin:
    head = _head_of(url)
    role = "critic" if head == "value" else "actor"
    spec = read_spec(url, head=head)
    source = HuggingFaceSource(url, spec)
    stack.callback(source.close)
    name = posixpath.basename(url)
    state = {
        "policy_version": 0,
        "source": fingerprint(url),
        "identity": {f"{SPECS[role]}.spec": json.dumps(asdict(spec))},
    }
    group = "reward.inference" if head == "score" else GROUPS[role]
    folders = dict.fromkeys(GROUPS, url)
    return Origin(hide_credentials(url), {group: source}, {group: spec}, name, 0, state, {}, folders, url)


def _head_of(url: str) -> Head:
    """Return which head a checkpoint has; a reward model's config says so itself."""
    architectures = read_config(url).get("architectures") or [""]
    if str(architectures[0]).endswith("ForSequenceClassification"):
        return "score"
    return "value" if has_value_head(url) else "lm"
