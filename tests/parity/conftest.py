"""Four workers for all parity tests of a session, and a small reward model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nereus.config import resolve_path
from nereus.runtime.engine import Engine
from nereus.runtime.local import LocalEngine

NUM_WORKERS = 4


@pytest.fixture(scope="session")
def workers() -> Iterator[Engine]:
    """Four running workers; more than cores, so for correctness only."""
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=2 << 30) as engine:
        engine.start(range(NUM_WORKERS))
        yield engine


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a score head and the tiny model's tokenizer, as `transformers` saves it."""
    return save_llama(tmp_path_factory.mktemp("reward-model"), seed=1, score_head=True)


def save_llama(folder: Path, seed: int, *, score_head: bool = False) -> Path:
    """Save a random Llama, as `transformers` does it, with the tiny model's tokenizer; return the folder.

    A language model is saved in float64, with norms that aren't 1, so that a float64 run starts from its very numbers.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=48,
        intermediate_size=70,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4 if score_head else 2,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    )
    model = LlamaForSequenceClassification(config) if score_head else LlamaForCausalLM(config).double()
    if not score_head:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    for file in Path(resolve_path("pkg://nereus.recipes/char-tokenizer")).iterdir():
        shutil.copy(file, folder)
    return folder
