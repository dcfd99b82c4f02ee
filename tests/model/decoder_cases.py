"""Small random models of the five families, and shards filled from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from nereus.layout import Layout
from nereus.model.decoder import DecoderShard
from nereus.model.group import Alone, Group
from nereus.model.spec import ModelSpec, RopeScaling

_BASE = ModelSpec("llama", 101, 48, 3, 6, 3, 8, 80, rms_eps=1e-5, max_positions=256)
SPECS = {
    "llama": replace(_BASE, heads=8, kv_heads=2, rope_theta=5e4, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16)),
    "mistral": replace(_BASE, family="mistral", sliding_window=6),
    "qwen2": replace(_BASE, family="qwen2", qkv_bias=True, rms_eps=1e-6),
    "qwen3": replace(_BASE, family="qwen3", head_dim=16, qk_norm=True, rms_eps=1e-6),
    "smollm2": replace(_BASE, heads=9, hidden=72, tie_embeddings=True, mlp_bias=True, o_bias=True, qkv_bias=True),
}


def hf_model(spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a random transformers model of `spec` in which no weight, norm or bias has a special value."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_position,
        }
    config = CONFIG_MAPPING[spec.family](
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        tie_word_embeddings=spec.tie_embeddings,
        attention_bias=spec.qkv_bias,
        mlp_bias=spec.mlp_bias,
        rms_norm_eps=spec.rms_eps,
        rope_parameters=rope,
        sliding_window=spec.sliding_window,
        max_position_embeddings=spec.max_positions,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.2 if parameter.dim() == 2 else 0.1)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model


def fill(shard: DecoderShard, weights: Mapping[str, Tensor]) -> DecoderShard:
    """Copy canonical tensors into a shard through its views."""
    parameters = dict(shard.named_parameters())
    with torch.no_grad():
        for view in shard.views():
            part = weights[view.slice.name][cut(view.slice)]
            view.of(parameters[view.parameter]).copy_(part)
    return shard


def cut(part: Any) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(part.starts, part.stops, strict=True))


def make_shard(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    layout: Layout | None = None,
    rank: int = 0,
    *,
    group: Group | None = None,
    dtype: torch.dtype = torch.float32,
) -> DecoderShard:
    shard = DecoderShard(spec, layout or Layout(), rank, group=group or Alone(), dtype=dtype, device="cpu")
    return fill(shard, weights)


def gradients(shard: DecoderShard) -> dict[Any, Tensor]:
    """Return the shard's gradients by canonical slice."""
    parameters = dict(shard.named_parameters())
    return {view.slice: view.of(parameters[view.parameter].grad) for view in shard.views()}


def random_ids(spec: ModelSpec, num_tokens: int, seed: int = 1) -> Tensor:
    return torch.randint(0, spec.vocab, (num_tokens,), generator=torch.Generator().manual_seed(seed))


def relative_error(result: Tensor, expected: Tensor) -> float:
    """Return the largest difference over the largest expected size."""
    return float((result - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
