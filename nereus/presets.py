"""Models by name, or by the config.json of any Hugging Face checkpoint: their sizes, without weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from nereus.model.hf_config import parse_config
from nereus.model.spec import Head, ModelSpec, RopeScaling

_LLAMA3_ROPE = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)

# From the models' public config.json files.
_MODELS: Mapping[str, ModelSpec] = {
    "llama-3.1-8b": ModelSpec(
        family="llama",
        vocab=128256,
        hidden=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate=14336,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_ROPE,
        max_positions=131072,
    ),
    "llama-3.3-70b": ModelSpec(
        family="llama",
        vocab=128256,
        hidden=8192,
        layers=80,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=28672,
        rope_theta=500_000.0,
        rope_scaling=_LLAMA3_ROPE,
        max_positions=131072,
    ),
    "qwen3-14b": ModelSpec(
        family="qwen3",
        vocab=151936,
        hidden=5120,
        layers=40,
        heads=40,
        kv_heads=8,
        head_dim=128,
        intermediate=17408,
        qk_norm=True,
        rms_eps=1e-6,
        rope_theta=1_000_000.0,
        max_positions=40960,
    ),
    "qwen3-32b": ModelSpec(
        family="qwen3",
        vocab=151936,
        hidden=5120,
        layers=64,
        heads=64,
        kv_heads=8,
        head_dim=128,
        intermediate=25600,
        qk_norm=True,
        rms_eps=1e-6,
        rope_theta=1_000_000.0,
        max_positions=40960,
    ),
    "smollm2-135m": ModelSpec(
        family="llama",
        vocab=49152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        tie_embeddings=True,
        rope_theta=100_000.0,
        max_positions=8192,
    ),
}


def list_models() -> list[str]:
    """Return the names of the presets."""
    return sorted(_MODELS)


def model_preset(name: str, head: Head = "lm") -> ModelSpec:
    """Return the sizes of a model by name.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in _MODELS:
        raise ValueError(f"preset is {name!r}, which there is not; choose one of {', '.join(list_models())}.")
    return replace(_MODELS[name], head=head)


def read_model(path: str | Path, head: Head = "lm") -> ModelSpec:
    """Return the sizes of a Hugging Face checkpoint: its folder, or its config.json.

    Raises:
        ValueError: there is no such file, it is no JSON object, or the model is none that can be trained here.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"path is {str(path)!r}, but {file} can't be read as JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ValueError(f"path is {str(path)!r}, but {file} holds no JSON object; give a model's config.json.")
    return parse_config(config, str(file), head)
