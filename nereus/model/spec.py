"""What a model is, without its weights: sizes, switches, and its tensors in canonical coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

Head = Literal["lm", "value", "score"]


@dataclass(frozen=True)
class RopeScaling:
    """The rotary frequency scaling of Llama 3 (`rope_type: llama3` of a Hugging Face config)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class ModelSpec:
    """Sizes and switches of one decoder with its head.

    `head` is "lm" (vocabulary logits), "value" (one number a token, `value_head.weight`) or "score"
    (Hugging Face sequence classification, `score.weight` with `num_labels` rows).
    """

    family: Literal["llama", "mistral", "qwen2", "qwen3"]
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rms_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    max_positions: int = 8192
    initializer_range: float = 0.02
    head: Head = "lm"
    num_labels: int = 1

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model has {self.heads} attention heads, which {self.kv_heads} KV heads do not divide; "
                "choose KV heads that divide the attention heads."
            )

    @property
    def group_size(self) -> int:
        """Attention heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def ties_head(self) -> bool:
        """True when the vocabulary head is the embedding matrix itself."""
        return self.head == "lm" and self.tie_embeddings


@dataclass(frozen=True)
class Split:
    """How tensor parallelism cuts a tensor: dimension `dim` consists of `num_units` units of `unit_size` elements.

    A rank holds whole units: KV groups of an attention matrix, single rows or columns of an MLP or vocabulary matrix.
    """

    dim: int
    num_units: int
    unit_size: int


@dataclass(frozen=True)
class TensorInfo:
    """One canonical tensor: its shape, how TP cuts it (None: every TP rank holds it whole), and where PP puts it.

    `place` is "embed" (first stage), "norm" or "head" (last stage), or the number of its layer. A tied embedding
    has place "embed" and is held by the last stage as well.
    """

    name: str
    shape: tuple[int, ...]
    split: Split | None
    place: int | Literal["embed", "norm", "head"]


def _attention(spec: ModelSpec, prefix: str, layer: int) -> list[TensorInfo]:
    q_rows, kv_rows, h = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    q_unit, kv_unit = spec.group_size * spec.head_dim, spec.head_dim
    infos = []
    for name, rows, unit in (("q_proj", q_rows, q_unit), ("k_proj", kv_rows, kv_unit), ("v_proj", kv_rows, kv_unit)):
        split = Split(0, spec.kv_heads, unit)
        infos.append(TensorInfo(f"{prefix}.self_attn.{name}.weight", (rows, h), split, layer))
        if spec.qkv_bias:
            infos.append(TensorInfo(f"{prefix}.self_attn.{name}.bias", (rows,), split, layer))
    infos.append(TensorInfo(f"{prefix}.self_attn.o_proj.weight", (h, q_rows), Split(1, spec.kv_heads, q_unit), layer))
    if spec.o_bias:
        infos.append(TensorInfo(f"{prefix}.self_attn.o_proj.bias", (h,), None, layer))
    if spec.qk_norm:
        infos.append(TensorInfo(f"{prefix}.self_attn.q_norm.weight", (spec.head_dim,), None, layer))
        infos.append(TensorInfo(f"{prefix}.self_attn.k_norm.weight", (spec.head_dim,), None, layer))
    return infos


def _mlp(spec: ModelSpec, prefix: str, layer: int) -> list[TensorInfo]:
    infos = []
    for name in ("gate_proj", "up_proj"):
        split = Split(0, spec.intermediate, 1)
        infos.append(TensorInfo(f"{prefix}.mlp.{name}.weight", (spec.intermediate, spec.hidden), split, layer))
        if spec.mlp_bias:
            infos.append(TensorInfo(f"{prefix}.mlp.{name}.bias", (spec.intermediate,), split, layer))
    down = Split(1, spec.intermediate, 1)
    infos.append(TensorInfo(f"{prefix}.mlp.down_proj.weight", (spec.hidden, spec.intermediate), down, layer))
    if spec.mlp_bias:
        infos.append(TensorInfo(f"{prefix}.mlp.down_proj.bias", (spec.hidden,), None, layer))
    return infos


@lru_cache(maxsize=64)
def tensors(spec: ModelSpec) -> Mapping[str, TensorInfo]:
    """Return the model's tensors by canonical (Hugging Face) name, in model order."""
    vocab_split = Split(0, spec.vocab, 1)
    infos = [TensorInfo("model.embed_tokens.weight", (spec.vocab, spec.hidden), vocab_split, "embed")]
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        infos.append(TensorInfo(f"{prefix}.input_layernorm.weight", (spec.hidden,), None, layer))
        infos += _attention(spec, prefix, layer)
        infos.append(TensorInfo(f"{prefix}.post_attention_layernorm.weight", (spec.hidden,), None, layer))
        infos += _mlp(spec, prefix, layer)
    infos.append(TensorInfo("model.norm.weight", (spec.hidden,), None, "norm"))
    if spec.head == "value":
        infos.append(TensorInfo("value_head.weight", (1, spec.hidden), None, "head"))
    elif spec.head == "score":
        infos.append(TensorInfo("score.weight", (spec.num_labels, spec.hidden), None, "head"))
    elif not spec.tie_embeddings:
        infos.append(TensorInfo("lm_head.weight", (spec.vocab, spec.hidden), vocab_split, "head"))
    return {info.name: info for info in infos}


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of the whole model, a tied embedding counted once."""
    total = 0
    for info in tensors(spec).values():
        size = 1
        for extent in info.shape:
            size *= extent
        total += size
    return total
