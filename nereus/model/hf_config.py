"""Between a Hugging Face config.json and a ModelSpec; whatever our decoder doesn't do is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nereus.model.spec import Head, ModelSpec, RopeScaling

# model_type -> prefix of the class names in `architectures`.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_SUFFIX = {"lm": "ForCausalLM", "score": "ForSequenceClassification", "value": "Model"}
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


def _refuse(where: str, field: str, value: Any, mend: str) -> ValueError:
    return ValueError(f"{where}: {field}={value!r} is not supported; {mend}.")


def parse_config(config: Mapping[str, Any], where: str, head: Head) -> ModelSpec:
    """Return the spec of a config as transformers 4 or 5 writes it; absent keys mean what they mean there.

    Args:
        config: the JSON object.
        where: path for error messages.
        head: which head the model gets; `num_labels` counts for "score" only.

    Raises:
        ValueError: a feature the decoder doesn't have, or a size that is missing or no positive number.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise _refuse(where, "model_type", family, "choose a Llama, Mistral, Qwen2 or Qwen3 checkpoint")
    _check_features(config, family, where)
    hidden, heads = _size(config, "hidden_size", where), _size(config, "num_attention_heads", where)
    head_dim = _head_dim(config, family, hidden, heads, where)
    attention_bias = bool(config.get("attention_bias", False))
    return ModelSpec(
        family=family,  # type: ignore[arg-type]  # checked above
        vocab=_size(config, "vocab_size", where),
        hidden=hidden,
        layers=_size(config, "num_hidden_layers", where),
        heads=heads,
        kv_heads=_kv_heads(config, family, heads, where),
        head_dim=head_dim,
        intermediate=_size(config, "intermediate_size", where),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or (family in ("llama", "qwen3") and attention_bias),
        o_bias=family in ("llama", "qwen3") and attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        rms_eps=_number(config, "rms_norm_eps", 1e-6, where),
        rope_theta=_rope_theta(config, where),
        rope_scaling=_rope_scaling(config, where),
        sliding_window=_sliding_window(config, family, where),
        max_positions=_size(config, "max_position_embeddings", where),
        initializer_range=_number(config, "initializer_range", 0.02, where),
        head=head,
        num_labels=_num_labels(config) if head == "score" else 1,
    )


def _check_features(config: Mapping[str, Any], family: str, where: str) -> None:
    known = {FAMILIES[family] + suffix for suffix in _SUFFIX.values()}
    architectures = _strings(config, "architectures", where)
    if architectures and not known & set(architectures):
        raise _refuse(where, "architectures", architectures, f"it must be one of {', '.join(sorted(known))}")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise _refuse(where, "hidden_act", activation, "the decoder's MLP is gated with silu")
    if config.get("quantization_config") is not None:
        method = config["quantization_config"]
        method = method.get("quant_method") if isinstance(method, Mapping) else method
        raise _refuse(where, "quantization_config", method, "save the model dequantized, in bfloat16 or float32")
    for key in _EXPERT_KEYS:
        if config.get(key):
            raise _refuse(where, key, config[key], "mixtures of experts can't be trained here; choose a dense model")
    if config.get("is_causal") is False:
        raise _refuse(where, "is_causal", False, "choose a causal model")
    if family != "llama" and config.get("mlp_bias"):
        raise _refuse(where, "mlp_bias", config["mlp_bias"], f"{FAMILIES[family]} models have no MLP biases")


def _strings(config: Mapping[str, Any], key: str, where: str) -> list[str]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"{where}: {key}={value!r} must be a list of names.")
    return value


def _size(config: Mapping[str, Any], key: str, where: str) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: {key}={value!r} must be a positive whole number; is this the config of a model?")
    return value


def _number(config: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{where}: {key}={value!r} must be a number of at least 0.")
    return float(value)


def _kv_heads(config: Mapping[str, Any], family: str, heads: int, where: str) -> int:
    # Configs older than grouped-query attention lack the key (Llama only) or hold null: one KV head per head.
    if config.get("num_key_value_heads") is None and ("num_key_value_heads" in config or family == "llama"):
        return heads
    return _size(config, "num_key_value_heads", where)


def _head_dim(config: Mapping[str, Any], family: str, hidden: int, heads: int, where: str) -> int:
    if config.get("head_dim") is not None:
        head_dim = _size(config, "head_dim", where)
    elif family == "qwen3":
        head_dim = 128  # its class default; not hidden / heads as with the others
    elif hidden % heads:
        raise ValueError(f"{where}: hidden_size={hidden} is no multiple of num_attention_heads={heads}; set head_dim.")
    else:
        head_dim = hidden // heads
    if head_dim % 2:
        raise _refuse(where, "head_dim", head_dim, "rotary positions need an even one")
    return head_dim


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters; transformers 5 too lets the older `rope_scaling` win where both are given."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def _rope_theta(config: Mapping[str, Any], where: str) -> float:
    rope = _rope(config)
    if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
        raise _refuse(where, "rope_parameters", rope, "one set of rotary parameters must serve all layers")
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return _number({"rope_theta": theta}, "rope_theta", theta, where)


def _rope_scaling(config: Mapping[str, Any], where: str) -> RopeScaling | None:
    rope = _rope(config)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise _refuse(where, "partial_rotary_factor", partial, "rotary positions cover whole heads")
    if kind == "default":
        return None
    if kind != "llama3":
        raise _refuse(where, "rope_type", kind, "only 'default' and 'llama3' are, so choose a model with one of them")
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    numbers = dict(rope, original_max_position_embeddings=original or config.get("max_position_embeddings"))
    for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
        if type(numbers.get(key)) not in (int, float) or not 0 < numbers[key] < math.inf:
            raise ValueError(f"{where}: rope_type='llama3' needs a positive {key}, not {numbers.get(key)!r}.")
    return RopeScaling(
        factor=float(numbers["factor"]),
        low_freq_factor=float(numbers["low_freq_factor"]),
        high_freq_factor=float(numbers["high_freq_factor"]),
        original_max_position=int(numbers["original_max_position_embeddings"]),
    )


def _sliding_window(config: Mapping[str, Any], family: str, where: str) -> int | None:
    """Return the window that all layers have, or None; a window in some layers only is refused."""
    layers = _size(config, "num_hidden_layers", where)
    windowed = family == "mistral" or (family.startswith("qwen") and bool(config.get("use_sliding_window")))
    window = config.get("sliding_window", 4096) if windowed else None
    if family == "llama":
        kinds = ["full_attention"]
    elif config.get("layer_types") is not None:
        kinds = _strings(config, "layer_types", where)
    elif family == "mistral" or window is None:
        kinds = ["full_attention" if window is None else "sliding_attention"]
    else:
        full = min(int(_number(config, "max_window_layers", 28, where)), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise _refuse(where, "layer_types", kind, "layers must be full_attention or sliding_attention")
    if len(set(kinds)) > 1:
        mend = "a window in some layers only can't be trained; choose a model with one kind of attention in all layers"
        raise _refuse(where, "sliding_window", config.get("sliding_window"), mend)
    if kinds[:1] != ["sliding_attention"]:
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"{where}: sliding_window={window!r} must be a positive number of tokens for sliding layers.")
    return window


def _num_labels(config: Mapping[str, Any]) -> int:
    if isinstance(config.get("id2label"), Mapping) and config["id2label"]:
        return len(config["id2label"])
    if type(config.get("num_labels")) is int:
        return max(1, config["num_labels"])
    # transformers writes no labels when there are two, its default; a language model gets a reward head of one.
    return 2 if any("SequenceClassification" in name for name in config.get("architectures") or []) else 1


def build_config(
    spec: ModelSpec, dtype: str, *, source: Mapping[str, Any] | None = None, eos_ids: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Return the config.json of an exported model, which transformers 4 and 5 load.

    Args:
        spec: the model that is written.
        dtype: such as "bfloat16".
        source: config.json of the checkpoint it came from, kept but for what the export changes; None builds one.
        eos_ids: end-of-sequence tokens, for a config that is built.
    """
    config = dict(source) if source is not None else _plain_config(spec, eos_ids)
    config.pop("auto_map", None)  # names code files of the source folder, which are not copied
    config["architectures"] = [FAMILIES[spec.family] + _SUFFIX[spec.head]]
    config["dtype"] = config["torch_dtype"] = dtype  # the name in transformers 5, and before
    if spec.head == "score":
        config["num_labels"] = spec.num_labels
        config["id2label"] = {str(label): f"LABEL_{label}" for label in range(spec.num_labels)}
        config["label2id"] = {f"LABEL_{label}": label for label in range(spec.num_labels)}
    return config


def _plain_config(spec: ModelSpec, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling is not None:
        rope = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_position,
        }
    config: dict[str, Any] = {
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.initializer_range,
        "rms_norm_eps": spec.rms_eps,
        "tie_word_embeddings": spec.tie_embeddings,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {**rope, "rope_theta": spec.rope_theta},
        "rope_scaling": rope if spec.rope_scaling is not None else None,
        "attention_dropout": 0.0,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": (list(eos_ids) if len(eos_ids) > 1 else eos_ids[0]) if eos_ids else None,
        "pad_token_id": None,
    }
    if spec.family in ("llama", "qwen3"):
        config["attention_bias"] = spec.o_bias
    if spec.family == "llama":
        config["mlp_bias"] = spec.mlp_bias
    if spec.family == "mistral" or spec.sliding_window is not None:
        config["sliding_window"] = spec.sliding_window
    if spec.family in ("qwen2", "qwen3"):
        config["use_sliding_window"] = spec.sliding_window is not None
        config["max_window_layers"] = 0 if spec.sliding_window is not None else spec.layers
    return config
