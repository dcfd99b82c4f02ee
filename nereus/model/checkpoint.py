"""Hugging Face checkpoints at the door: what model a folder holds, in which files, and whether it is whole.

Only JSON and safetensors headers are read here; weights are read by `nereus.model.weights`.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nereus.model.hf_config import parse_config
from nereus.model.spec import Head, ModelSpec, tensors
from storage.errors import describe_error, hide_credentials
from storage.safetensors_file import SafetensorsFile
from storage.safetensors_header import TensorEntry
from storage.urls import join_url, open_filesystem

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_JSON_BYTES = 64 * 2**20  # tokenizer.json of a large vocabulary has 10 to 35 MB
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_spec(path: str, *, head: Head = "lm") -> ModelSpec:
    """Return the spec of a Hugging Face checkpoint folder (or of a config.json, local or behind a URL).

    Raises:
        ValueError: the folder or its config.json is missing or broken, or names a feature that isn't supported.
    """
    return parse_config(read_config(path), str(path), head)


def read_config(path: str) -> dict[str, Any]:
    """Return the config.json of a checkpoint folder, or `path` itself when it is a .json file."""
    if str(path).endswith(".json"):
        config = read_json(path)
        if config is None:
            raise ValueError(f"{path} does not exist; give a Hugging Face model folder or its config.json.")
        return config
    check_folder(path)
    config = read_json(join_url(path, "config.json"))
    if config is None:
        raise ValueError(f"{path} holds no config.json; give a folder written by `save_pretrained` of transformers.")
    return config


def check_folder(path: str) -> None:
    """Raise ValueError when `path` is no folder that can be read."""
    try:
        filesystem, inside = open_filesystem(path)
        found = filesystem.isdir(inside)
    except Exception as error:  # every store has errors of its own: credentials, network, unknown protocol
        where = hide_credentials(str(path))
        raise ValueError(
            f"model folder {where!r} can't be read ({describe_error(error)}); check the access."
        ) from error
    if not found:
        raise ValueError(
            f"model folder {str(path)!r} does not exist; give a folder with config.json and safetensors files "
            "(a model of the Hugging Face hub must be downloaded first)."
        )


def read_json(path: str) -> dict[str, Any] | None:
    """Return a JSON object from a file, None when there is no such file.

    Raises:
        ValueError: it is too large or no JSON object.
    """
    filesystem, inside = open_filesystem(path)
    try:
        size = filesystem.size(inside)
        if size is not None and size > _MAX_JSON_BYTES:
            raise ValueError(f"{path} has {size} bytes, above the limit of {_MAX_JSON_BYTES} for a JSON file.")
        value = json.loads(filesystem.cat_file(inside))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}); write or download it again.") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} where a JSON object is expected.")
    return value


def checkpoint_files(path: str) -> tuple[str, ...]:
    """Return the safetensors files of a checkpoint: one file, or those that its index names.

    Raises:
        ValueError: there are none, or the index names a file that is missing or lies elsewhere.
    """
    check_folder(path)
    filesystem, inside = open_filesystem(path)
    present = {posixpath.basename(name.rstrip("/")) for name in filesystem.ls(inside, detail=False)}
    if SINGLE_FILE in present:
        return (join_url(path, SINGLE_FILE),)
    if INDEX_FILE not in present:
        raise ValueError(_why_no_weights(path, present))
    index = read_json(join_url(path, INDEX_FILE)) or {}
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{join_url(path, INDEX_FILE)} holds no weight_map; write or download it again.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise ValueError(f"{join_url(path, INDEX_FILE)} names {name[:200]!r}, which is no file of its folder.")
        if name not in present:
            raise ValueError(f"{path} lacks {name}, which its {INDEX_FILE} names; download the folder again.")
    return tuple(join_url(path, name) for name in names)


def _why_no_weights(path: str, present: Iterable[str]) -> str:
    others = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth", ".gguf", ".h5")))
    if others:
        return (
            f"{path} holds weights as {others[0]} only, and safetensors is the one format read here; convert it with "
            "`AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)` of transformers."
        )
    return f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}; download the model's weights into it."


@dataclass(frozen=True)
class StoredTensor:
    """Where a canonical tensor lies: the file, and its entry there under the name that the file uses."""

    url: str
    entry: TensorEntry


def stored_tensors(path: str) -> Mapping[str, StoredTensor]:
    """Return all tensors of a checkpoint's files by the names used there.

    Raises:
        ValueError: no weights, a header that is not to be trusted, or a tensor in two files.
    """
    stored: dict[str, StoredTensor] = {}
    for url in checkpoint_files(path):
        try:
            with SafetensorsFile(url) as file:
                entries = file.header.entries
        except OSError as error:
            raise ValueError(f"{url} can't be read ({error}); check its permissions or download it again.") from error
        for entry in entries.values():
            if entry.name in stored:
                raise ValueError(f"{path} holds tensor {entry.name!r} in two files; download the folder again.")
            stored[entry.name] = StoredTensor(url, entry)
    return stored


def has_value_head(path: str) -> bool:
    """Return whether a checkpoint can start a critic's value head: it has one, or a score head with one label."""
    stored = stored_tensors(path)
    score = stored.get("score.weight")
    return "value_head.weight" in stored or (score is not None and score.entry.shape[:1] == (1,))


def locate_tensors(path: str, spec: ModelSpec) -> Mapping[str, StoredTensor]:
    """Return where each canonical tensor of the spec lies, by headers only.

    Names are accepted with and without the prefix "model."; a tied head may be stored in place of the embedding; a
    value head may start from the one-label score head of a reward model.

    Raises:
        ValueError: a tensor is missing, there twice, of another shape than the spec says, or not of a float dtype; or
            the files hold a tensor inside the decoder that the spec has no place for.
    """
    stored = stored_tensors(path)
    found = {}
    for name, info in tensors(spec).items():
        place = next((stored[alias] for alias in _aliases(name, spec) if alias in stored), None)
        if place is None:
            raise ValueError(_why_missing(path, name, spec))
        if place.entry.shape != info.shape:
            raise ValueError(
                f"{path}: tensor {place.entry.name} has shape {list(place.entry.shape)}, but its config.json asks for "
                f"{list(info.shape)}; config and weights belong to different models."
            )
        if place.entry.dtype not in _FLOATS:
            raise ValueError(
                f"{path}: tensor {place.entry.name} has dtype {place.entry.dtype}, and quantized weights can't be "
                "trained; save the model in bfloat16 or float32."
            )
        found[name] = place
    _check_leftovers(path, stored, found)
    return found


def check_checkpoint(path: str, spec: ModelSpec) -> None:
    """Raise ValueError when the folder doesn't hold just the tensors of the spec (see `locate_tensors`)."""
    locate_tensors(path, spec)


def _aliases(name: str, spec: ModelSpec) -> list[str]:
    names = [name]
    if name.startswith("model."):
        names.append(name.removeprefix("model."))
    if name == "model.embed_tokens.weight" and spec.ties_head:
        names.append("lm_head.weight")
    if name == "value_head.weight":
        names.append("score.weight")
    return names


def _why_missing(path: str, name: str, spec: ModelSpec) -> str:
    if name == "score.weight":
        return f"{path} holds no score.weight, so it is no reward model; give a sequence classification checkpoint."
    if name == "lm_head.weight":
        return f"{path} holds no lm_head.weight, and its config.json doesn't set tie_word_embeddings; give a causal LM."
    return f"{path} holds no tensor {name}, which its config.json asks for; download the folder again."


def _check_leftovers(path: str, stored: Mapping[str, StoredTensor], found: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors of the layers that the decoder would leave out (biases, scales, more layers than configured)."""
    used = {place.entry.name for place in found.values()}
    for name in stored:
        inside = name.removeprefix("model.").startswith("layers.")
        if inside and name not in used and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(
                f"{path} holds tensor {name}, for which the model of its config.json has no place; "
                "config and weights belong to different models."
            )
