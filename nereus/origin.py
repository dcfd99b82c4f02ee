"""Where a copy comes from: a staged set, the newest intact commit of a run, or a Hugging Face checkpoint."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from nereus.commits import live_commits, read_commit, reading
from nereus.identity import checkpoint_of, parse_spec, tokenizer_of
from nereus.model.checkpoint import has_value_head, read_config, read_spec
from nereus.model.fingerprint import fingerprint
from nereus.model.spec import Head, ModelSpec
from nereus.resume import read_recorded, staging_root
from nereus.tensor_source import HuggingFaceSource, StateSource, TensorSource
from storage.errors import hide_credentials
from storage.manifest import MANIFEST_NAME, DamagedState, Manifest
from storage.state import read_state
from storage.urls import join_url, open_filesystem

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


@contextmanager
def open_origin(url: str) -> Iterator[Origin]:
    """Give what lies in a folder, kept from being retired until the end of the block.

    Raises:
        ValueError: none of the three is there. A DamagedState where a manifest is damaged.
    """
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    with ExitStack() as stack:
        if filesystem.exists(join_url(path, MANIFEST_NAME)):
            stack.enter_context(reading(url))
            yield _origin_of_state(url, read_state(url), {})
        elif filesystem.exists(join_url(path, "journal")):
            yield _origin_of_run(url, stack)
        elif filesystem.exists(join_url(path, "config.json")):
            yield _origin_of_checkpoint(url, stack)
        else:
            raise ValueError(
                f"{hide_credentials(url)} holds neither staged state ({MANIFEST_NAME}), nor a run (journal/), nor a "
                "Hugging Face checkpoint (config.json); give the folder of one of them."
            )


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


def _origin_of_run(url: str, stack: ExitStack) -> Origin:
    """Return the newest intact commit of a run; only its manifest is looked at yet."""
    run = read_recorded(url)
    root = staging_root(run.config)
    notes: list[str] = []
    for commit in reversed(live_commits(run.entries)):
        place = join_url(root, commit.set_name)
        mark = stack.enter_context(ExitStack())
        mark.enter_context(reading(place))
        try:
            origin = _origin_of_state(place, read_commit(root, commit), run.identity)
        except DamagedState as error:
            notes.append(str(error))
            mark.close()
            continue
        folders = {role: checkpoint_of(run.config, SPECS[role]) for role in GROUPS}
        return replace(origin, config_from=folders, tokenizer_from=tokenizer_of(run.config), notes=tuple(notes))
    where = hide_credentials(url)
    raise ValueError(
        f"{where} holds no commit that is intact: {notes[0]}"
        if notes
        else f"{where} holds no commit yet; wait for one."
    )


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
