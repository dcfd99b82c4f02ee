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
    from transformers import LlamaConfig, LlamaForSequenceClassification

    folder = tmp_path_factory.mktemp("reward-model")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=29,
        hidden_size=48,
        intermediate_size=70,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.2,
    )
    LlamaForSequenceClassification(config).save_pretrained(folder)
    for file in Path(resolve_path("pkg://nereus.recipes/char-tokenizer")).iterdir():
        shutil.copy(file, folder)
    return folder
