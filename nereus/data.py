"""Prompts: reading them from JSON lines at any fsspec URL, and turning them into tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import xxhash

from storage.errors import describe_error, hide_credentials

logger = logging.getLogger(__name__)

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Example:
    """One line of a prompts file.

    Attributes:
        prompt: a text, or chat messages such as [{"role": "user", "content": "2 + 3?"}].
        example: all other keys of the line; the reward function sees them.
        where: file and line, for messages.
    """

    prompt: Prompt
    example: dict[str, Any]
    where: str


@dataclass(frozen=True)
class PromptTokens:
    """A prompt ready for generation.

    Attributes:
        token_ids: never empty.
        text: what the reward function gets as `prompt`; chat messages rendered by the chat template.
        example: the other keys of the prompt's line.
        messages: the prompt as chat messages, for a reward model with a chat template of its own.
    """

    token_ids: list[int]
    text: str
    example: dict[str, Any]
    messages: list[dict[str, Any]]


def read_bytes(url: str) -> bytes:
    """Return the prompts file's bytes.

    Raises:
        ValueError: there is no such file, or it can't be read.
    """
    try:
        with fsspec.open(url, "rb") as file:
            return file.read()
    except Exception as error:  # every store has errors of its own: credentials, network, unknown protocol
        raise ValueError(
            f"data.prompts: {hide_credentials(url)} can't be read ({describe_error(error)}); name a JSON lines file."
        ) from error


def fingerprint(url: str) -> str:
    """Return xxh3_128, in hex, of the file's bytes: a resumed run must find the same.

    Raises:
        ValueError: the file can't be read.
    """
    return xxhash.xxh3_128_hexdigest(read_bytes(url))


def read_prompts(url: str) -> list[Example]:
    """Return the examples of a JSON lines file, in file order; blank lines are skipped.

    Raises:
        ValueError: the file can't be read, has no prompt at all, or a line (named) is broken.
    """
    lines = read_bytes(url).split(b"\n")
    examples = [_parse(line, f"{url} line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not examples:
        raise ValueError(f'data.prompts: {url} is empty; give it one JSON object a line, such as {{"prompt": "Hi"}}.')
    return examples


def _parse(line: bytes, where: str) -> Example:
    try:
        record = json.loads(line)
    except ValueError as error:  # broken JSON or broken UTF-8
        raise ValueError(f"data.prompts: {where} is not JSON ({error}); write one object a line.") from error
    if not isinstance(record, dict):
        raise ValueError(f'data.prompts: {where} is not an object; write {{"prompt": ...}}.')
    if "prompt" not in record:
        raise ValueError(f'data.prompts: {where} has no "prompt" among its keys {sorted(record)}; add one.')
    prompt = record.pop("prompt")
    if not _is_prompt(prompt):
        raise ValueError(
            f'data.prompts: {where} has a "prompt" that is neither a text with at least one character nor a list of '
            f'messages; write a string or [{{"role": "user", "content": "..."}}].'
        )
    return Example(prompt, record, where)


def _is_prompt(prompt: object) -> bool:
    if isinstance(prompt, str):
        return bool(prompt)
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in prompt
    )


def encode_prompts(examples: Sequence[Example], tokenizer: Any, max_prompt_tokens: int) -> list[PromptTokens]:
    """Return the prompts as tokens, without those that are too long, which one warning counts.

    Args:
        examples: from `read_prompts`.
        tokenizer: has `encode` and, for chat messages, `apply_chat_template`, as Hugging Face tokenizers do.
        max_prompt_tokens: longest prompt kept.

    Raises:
        ValueError: no prompt is left, a prompt has no token, or the chat template refuses the messages.
    """
    prompts = [_encode(example, tokenizer) for example in examples]
    kept = [prompt for prompt in prompts if len(prompt.token_ids) <= max_prompt_tokens]
    dropped = len(prompts) - len(kept)
    if not kept:
        shortest = min((len(prompt.token_ids) for prompt in prompts), default=0)
        raise ValueError(
            f"rollout.max_prompt_tokens is {max_prompt_tokens}, but the shortest of {len(prompts)} prompts has "
            f"{shortest} tokens: raise it to at least {shortest}."
        )
    if dropped:
        logger.warning(
            "Dropped %d of %d prompts longer than rollout.max_prompt_tokens = %d.",
            dropped,
            len(prompts),
            max_prompt_tokens,
        )
    return kept


def _encode(example: Example, tokenizer: Any) -> PromptTokens:
    if isinstance(example.prompt, str):
        text, messages = example.prompt, [{"role": "user", "content": example.prompt}]
        token_ids = tokenizer.encode(text)
    else:
        messages = example.prompt
        try:
            text = tokenizer.apply_chat_template(example.prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its own: it raises what it likes
            raise ValueError(
                f"data.prompts: {example.where} holds chat messages that the tokenizer's chat template refuses "
                f"({error}); use a model with a chat template or a plain text."
            ) from error
        token_ids = tokenizer.encode(text, add_special_tokens=False)  # the template has put them in
    if not token_ids:
        raise ValueError(f"data.prompts: {example.where} has a prompt without any token; write a longer one.")
    return PromptTokens([int(token) for token in token_ids], text, example.example, messages)
