"""What a model folder says of its tokens: the special ones, and the files from which a tokenizer is loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nereus.model.checkpoint import check_folder, read_json
from storage.errors import describe_error, hide_credentials
from storage.urls import join_url, local_path, open_filesystem

# What tokenizers of transformers 4 and 5 save; code files (*.py) are never copied.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
)


@contextmanager
def fetch_tokenizer(path: str) -> Iterator[str]:
    """Give a local folder that `AutoTokenizer.from_pretrained` loads, for a model or tokenizer folder at any URL.

    A local folder is given as it is. Of another one the tokenizer's files and config.json (which names the kind of
    tokenizer) are copied to a temporary folder, which is removed at the end of the block.

    Raises:
        ValueError: the folder is missing or can't be read.
    """
    check_folder(path)
    if (local := local_path(path)) is not None:
        yield local
        return
    with tempfile.TemporaryDirectory(prefix="nereus-tokenizer-") as folder:
        try:
            filesystem, inside = open_filesystem(path)
            for name in (*TOKENIZER_FILES, "config.json"):
                if filesystem.exists(f"{inside}/{name}"):
                    filesystem.get_file(f"{inside}/{name}", os.path.join(folder, name))
        except Exception as error:  # every store has errors of its own
            text = f"the tokenizer of {hide_credentials(path)} can't be read ({describe_error(error)})"
            raise ValueError(f"{text}; check the folder and the access to it.") from error
        yield folder


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
