"""The works on which a PPO step is measured, and the models and prompts that both sides read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

# Words that are one token each after a space, in most vocabularies made from English text.
_WORDS = ("time", "people", "water", "world", "house", "school", "money", "night", "story", "music", "city", "river")
# The tiny Llama: its weights are random, so what it writes means nothing, but costs the same.
_TINY = {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocab": 512}


@dataclass(frozen=True)
class Work:
    """One PPO step to measure: every prompt and every response has exactly the given length, and there is one epoch.

    Each side runs `rounds` times in turn; each time it makes one step to warm up and then `steps` that count.
    """

    name: str
    model: Literal["smollm2", "tiny"]
    precision: Literal["float32", "bfloat16"]
    prompts: int
    prompt_tokens: int
    response_tokens: int
    minibatches: int = 1
    steps: int = 2
    rounds: int = 2

    @property
    def description(self) -> str:
        updates = "1 minibatch" if self.minibatches == 1 else f"{self.minibatches} minibatches"
        lengths = f"{self.prompts} x ({self.prompt_tokens} + {self.response_tokens}) tokens"
        return f"{self.name}: {self.model} {self.precision}, {lengths}, {updates}"


_SMALL = Work("smollm2-float32", "smollm2", "float32", prompts=8, prompt_tokens=32, response_tokens=64)
WORKS = {
    work.name: work
    for work in (
        _SMALL,
        replace(_SMALL, name="smollm2-bfloat16", precision="bfloat16"),
        replace(_SMALL, name="smollm2-long", prompts=16, response_tokens=128, minibatches=2, rounds=1),
        Work("tiny", "tiny", "float32", prompts=32, prompt_tokens=16, response_tokens=64, steps=5),
    )
}


def make_quick(work: Work) -> Work:
    """Return a work that takes seconds and says little: for a look at whether everything runs."""
    work = replace(work, steps=1, rounds=1)
    return work if work.model == "tiny" else replace(work, prompts=2, prompt_tokens=8, response_tokens=8, minibatches=1)


@dataclass(frozen=True)
class Inputs:
    """What both sides read.

    Attributes:
        model: Hugging Face directory of actor and reference, with a tokenizer.
        reward: sequence classification directory; its backbone is the model's. Critic and reward model start from it.
        prompts: JSON lines; "prompt" is a text of exactly `prompt_tokens` tokens, "token_ids" are these.
    """

    model: Path
    reward: Path
    prompts: Path


def prepare_inputs(work: Work, smollm2: str, folder: Path) -> Inputs:
    """Make what a work needs below `folder`; models that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Path(smollm2) if work.model == "smollm2" else folder / "tiny"
    if work.model == "tiny" and not (model / "config.json").exists():
        _make_tiny(model)
    reward = folder / f"{work.model}-reward"
    if not (reward / "config.json").exists():
        _make_reward_model(model, reward)
    prompts = folder / f"{work.name}-prompts.jsonl"
    _write_prompts(work, model, prompts)
    return Inputs(model.resolve(), reward.resolve(), prompts.resolve())


def _make_tiny(folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    special = ["<unk>", "<pad>", "<eos>"]
    words = [*special, *(f"w{index}" for index in range(len(special), _TINY["vocab"]))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = LlamaConfig(
        vocab_size=_TINY["vocab"],
        hidden_size=_TINY["hidden"],
        intermediate_size=_TINY["intermediate"],
        num_hidden_layers=_TINY["layers"],
        num_attention_heads=_TINY["heads"],
        num_key_value_heads=_TINY["kv_heads"],
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=1,
    )
    torch.manual_seed(0)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)


def _make_reward_model(model: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    reward = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1, dtype=torch.bfloat16)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    reward.save_pretrained(folder)


def _write_prompts(work: Work, model: Path, path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    words = [f"w{index}" for index in range(3, _TINY["vocab"])] if work.model == "tiny" else list(_WORDS)
    generator = random.Random(0)
    lines = [_make_prompt(tokenizer.encode, words, work.prompt_tokens, generator) for _ in range(work.prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _make_prompt(
    encode: Callable[[str], list[int]], words: Sequence[str], num_tokens: int, generator: random.Random
) -> dict[str, Any]:
    """Return a random text of exactly that many tokens, and the tokens."""
    text = generator.choice(words)
    while len(encode(text)) < num_tokens:
        text += " " + generator.choice(words)
    token_ids = encode(text)
    assert len(token_ids) == num_tokens, f"{len(token_ids)} tokens in {text!r}"
    return {"prompt": text, "token_ids": token_ids}
