"""What a run is made of: fingerprints of its models, prompts and tokenizers, and the specs of what it trains."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import xxhash

from nereus.config import OptionalModelConfig, RunConfig, resolve_path
from nereus.data import fingerprint as fingerprint_prompts
from nereus.model.checkpoint import read_spec
from nereus.model.fingerprint import fingerprint as fingerprint_model
from nereus.model.spec import Head, ModelSpec, RopeScaling
from nereus.model.tokens import TOKENIZER_FILES
from nereus.runtime.job import tiny_spec
from storage.errors import describe_error, hide_credentials
from storage.urls import join_url, local_path, open_filesystem


def compute_identity(config: RunConfig) -> dict[str, str]:
    """Return what a run is made of, as texts that change when any of it changes.

    Keys: `model`, `critic`, `reference` and, with a reward model, `reward`: a checkpoint's fingerprint, or
    `tiny:WHOSE:HASH` of a random model; `prompts`, `tokenizer`, `reward_tokenizer`: hashes of their files;
    `model.spec` and `critic.spec`: sizes and switches as JSON (`parse_spec`), by which staged state can be read alone.
    Takes about a second.

    Raises:
        ValueError: something that the config names is missing or can't be read.
    """
    seen: dict[str, str] = {}
    identity = {role: _weights_of(config, role, seen) for role in _models(config)}
    prompts = resolve_path(config.data.prompts)
    _check_relative("data.prompts", prompts)
    identity["prompts"] = fingerprint_prompts(prompts)
    tokenizer = tokenizer_of(config)
    _check_relative("model.path" if config.model.tiny is None else "model.tiny.tokenizer", tokenizer)
    identity["tokenizer"] = _hash_tokenizer(tokenizer)
    if config.reward.model is not None:
        identity["reward_tokenizer"] = _hash_tokenizer(_folder(config.reward.model))
    for role in ("model", "critic"):
        identity[f"{role}.spec"] = json.dumps(asdict(spec_of(config, role)))
    return identity


def spec_of(config: RunConfig, role: str) -> ModelSpec:
    """Return the spec of a config's `model` (the actor) or `critic`."""
    head: Head = "value" if role == "critic" else "lm"
    model = _own_or_actors(config, role)
    return read_spec(_folder(model.path), head=head) if model.tiny is None else tiny_spec(model.tiny, head)


def checkpoint_of(config: RunConfig, role: str) -> str | None:
    """Return the Hugging Face folder that the config's `model` or `critic` began with; None for a random one."""
    model = _own_or_actors(config, role)
    return _folder(model.path) if model.tiny is None else None


def tokenizer_of(config: RunConfig) -> str:
    """Return the folder of the actor's tokenizer."""
    tiny = config.model.tiny
    return _folder(config.model.path if tiny is None else tiny.tokenizer)


def _own_or_actors(config: RunConfig, role: str) -> OptionalModelConfig:
    model = _models(config)[role]
    return config.model if model.path is None and model.tiny is None else model


def parse_spec(text: str) -> ModelSpec:
    """Return the spec that `compute_identity` has written down.

    Raises:
        ValueError: it is none, or another version's.
    """
    try:
        record = json.loads(text)
        scaling = record.get("rope_scaling")
        return ModelSpec(**{**record, "rope_scaling": None if scaling is None else RopeScaling(**scaling)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the recorded model can't be read ({error}); use the version that wrote it.") from None


def _models(config: RunConfig) -> dict[str, OptionalModelConfig]:
    models = {"model": config.model, "critic": config.critic, "reference": config.reference}
    if config.reward.model is not None:
        models["reward"] = OptionalModelConfig(path=config.reward.model)
    return models


def _weights_of(config: RunConfig, role: str, seen: dict[str, str]) -> str:
    model = _own_or_actors(config, role)
    owner = "model" if model is config.model else role
    if model.tiny is not None:  # drawn from the seed, for one owner
        sizes = model.tiny.model_dump_json(exclude={"tokenizer"})
        return f"tiny:{owner}:{xxhash.xxh3_64_hexdigest(sizes.encode())}"
    path = _folder(model.path)
    if path not in seen:
        _check_relative(f"{owner}.path" if owner != "reward" else "reward.model", path)
        seen[path] = fingerprint_model(path)
    return seen[path]


def _folder(path: str | None) -> str:
    assert path is not None
    return os.path.expanduser(resolve_path(path))


def _check_relative(field: str, path: str) -> None:
    """Explain a relative path that leads nowhere: a run may have been started in another directory."""
    if local_path(path) is not None and "://" not in path and not os.path.isabs(path) and not os.path.exists(path):
        raise ValueError(
            f"`{field}`: {path} does not exist in the working directory {os.getcwd()}; "
            f"go to the directory where the run was started, or give {field}=PLACE."
        )


def _hash_tokenizer(folder: str) -> str:
    """Return xxh3_128 of the names and bytes of a folder's tokenizer files."""
    digest = xxhash.xxh3_128()
    try:
        filesystem, inside = open_filesystem(folder)
        for name in TOKENIZER_FILES:
            if filesystem.isfile(join_url(inside, name)):
                data = filesystem.cat_file(join_url(inside, name))
                digest.update(json.dumps([name, len(data)]).encode())
                digest.update(data)
    except Exception as error:  # every store has errors of its own
        where = hide_credentials(folder)
        raise ValueError(f"the tokenizer in {where} can't be read ({describe_error(error)}).") from error
    return digest.hexdigest()
