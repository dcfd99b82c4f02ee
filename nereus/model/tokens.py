"""Special tokens that a model folder names; read from its JSON files, without loading a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nereus.model.checkpoint import check_folder, read_json
from storage.urls import join_url


def read_eos_ids(path: str) -> tuple[int, ...]:
    """Return the tokens that end a response, of a model folder or a tokenizer folder; empty when none is named.

    The first of these that names any counts: generation_config.json, config.json (both `eos_token_id`, a number or a
    list), the tokenizer's `eos_token`.

    Raises:
        ValueError: the folder is missing, or a file of it is broken.
    """
    check_folder(path)
    for name in ("generation_config.json", "config.json"):
        ids = _ids((read_json(join_url(path, name)) or {}).get("eos_token_id"), join_url(path, name))
        if ids:
            return ids
    return _tokenizer_eos(path)


def _ids(value: Any, where: str) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in values):
        raise ValueError(f"{where}: eos_token_id={value!r} must be a token id or a list of them.")
    return tuple(item for item in values if item >= 0)  # some configs hold -1 for "none"


def _tokenizer_eos(path: str) -> tuple[int, ...]:
    text = (read_json(join_url(path, "tokenizer_config.json")) or {}).get("eos_token")
    if text is None:
        text = (read_json(join_url(path, "special_tokens_map.json")) or {}).get("eos_token")
    if isinstance(text, Mapping):  # an added token with its stripping rules
        text = text.get("content")
    if not isinstance(text, str):
        return ()
    tokenizer = read_json(join_url(path, "tokenizer.json")) or {}
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == text:
            return (int(added["id"]),)
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return (int(vocab[text]),) if isinstance(vocab, Mapping) and text in vocab else ()
