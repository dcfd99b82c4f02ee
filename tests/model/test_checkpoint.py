"""Specs and weights of Hugging Face folders: read as transformers means them, or refused in one sentence."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, LlamaConfig

from nereus.model.checkpoint import check_checkpoint, checkpoint_files, has_value_head, read_spec
from nereus.model.fingerprint import fingerprint
from nereus.model.hf_config import build_config, parse_config
from nereus.model.spec import RopeScaling
from nereus.model.tokens import read_eos_ids
from tests.model.decoder_cases import SPECS, hf_model

LLAMA4 = {  # as transformers 4 wrote it for Llama 3.1
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.03,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
    "vocab_size": 128,
}
QWEN4 = {key: value for key, value in LLAMA4.items() if not key.startswith("rope") and "bias" not in key} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 2,
}
MISTRAL4 = QWEN4 | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 512}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """One saved checkpoint of each family, sharded over several files."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name, spec in SPECS.items():
        hf_model(spec).save_pretrained(root / name, max_shard_size="60KB")
    return root


@pytest.fixture
def folder(folders, tmp_path):
    """A private copy of the llama checkpoint, with which a test may do as it likes."""
    return Path(shutil.copytree(folders / "llama", tmp_path / "model"))


@pytest.mark.parametrize("name", SPECS)
def test_spec_of_saved_models(folders, name):
    expected = replace(SPECS[name], initializer_range=0.02)
    assert read_spec(folders / name) == expected
    assert read_spec(folders / name / "config.json") == expected
    check_checkpoint(folders / name, read_spec(folders / name))
    assert len(checkpoint_files(folders / name)) > 1


def test_spec_of_transformers_4():
    spec = parse_config(LLAMA4, "x", "lm")
    assert spec.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 512) and spec.rope_theta == 5e5
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.rms_eps, spec.max_positions) == (8, 2, 8, 1e-5, 4096)
    qwen = parse_config(QWEN4, "x", "lm")
    assert qwen.sliding_window is None and qwen.qkv_bias and not qwen.o_bias and qwen.rope_theta == 1e6
    assert parse_config(QWEN4 | {"use_sliding_window": True, "max_window_layers": 0}, "x", "lm").sliding_window == 32768
    assert parse_config(QWEN4 | {"use_sliding_window": True, "max_window_layers": 4}, "x", "lm").sliding_window is None
    assert parse_config(MISTRAL4, "x", "lm").sliding_window == 512
    assert parse_config(MISTRAL4 | {"sliding_window": None}, "x", "lm").sliding_window is None
    assert not parse_config(MISTRAL4 | {"attention_bias": True}, "x", "lm").qkv_bias  # transformers ignores it there
    old = {key: value for key, value in LLAMA4.items() if key not in ("num_key_value_heads", "rope_scaling")}
    assert parse_config(old | {"rope_scaling": None}, "x", "lm").kv_heads == 8


@pytest.mark.parametrize("base", [LLAMA4, QWEN4, MISTRAL4])
def test_absent_keys_mean_what_transformers_means(base, tmp_path):
    for absent in (
        "rms_norm_eps",
        "initializer_range",
        "sliding_window",
        "tie_word_embeddings",
        "head_dim",
        "hidden_act",
    ):
        config = {key: value for key, value in base.items() if key != absent}
        (tmp_path / "config.json").write_text(json.dumps(config))
        theirs, ours = AutoConfig.from_pretrained(tmp_path), read_spec(tmp_path)
        assert ours.rms_eps == theirs.rms_norm_eps and ours.initializer_range == theirs.initializer_range
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


REFUSED = {
    "model_type": (LLAMA4, {"model_type": "gemma2"}),
    "architectures": (LLAMA4, {"architectures": ["LlamaForTokenClassification"]}),
    "hidden_act": (LLAMA4, {"hidden_act": "gelu"}),
    "quantization_config": (LLAMA4, {"quantization_config": {"quant_method": "awq", "bits": 4}}),
    "num_local_experts": (MISTRAL4, {"num_local_experts": 8}),
    "num_experts": (QWEN4, {"num_experts": 60}),
    "rope_type": (LLAMA4, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
    "rope_type='linear'": (LLAMA4, {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "low_freq_factor": (LLAMA4, {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}),
    "rope_parameters": (LLAMA4, {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}),
    "partial_rotary_factor": (LLAMA4, {"partial_rotary_factor": 0.5}),
    "sliding_window": (QWEN4, {"use_sliding_window": True}),
    "sliding_window=64": (
        QWEN4,
        {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "layer_types": (QWEN4, {"layer_types": ["linear_attention"] * 4}),
    "is_causal": (LLAMA4, {"is_causal": False}),
    "mlp_bias": (QWEN4, {"mlp_bias": True}),
    "head_dim": (LLAMA4, {"head_dim": 7}),
    "hidden_size": (LLAMA4, {"hidden_size": None}),
    "vocab_size": (LLAMA4, {"vocab_size": "128"}),
    "num_hidden_layers": (LLAMA4, {"num_hidden_layers": 0}),
    "num_attention_heads": (LLAMA4, {"num_attention_heads": 7}),
    "3 KV heads": (LLAMA4, {"num_key_value_heads": 3}),
    "rms_norm_eps": (LLAMA4, {"rms_norm_eps": "tiny"}),
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_features_are_named(field):
    base, change = REFUSED[field]
    with pytest.raises(ValueError) as caught:
        parse_config(base | change, "FOLDER", "lm")
    assert field in str(caught.value) and "\n" not in str(caught.value)


ODD_VALUES = [None, "x", -1, 0, 1.5, math.nan, True, [], [{}], {}, {"a": {}}]


@pytest.mark.parametrize("base", [LLAMA4, QWEN4, MISTRAL4])
def test_odd_values_are_a_spec_or_a_sentence(base):
    keys = {
        *base,
        "layer_types",
        "head_dim",
        "rope_parameters",
        "use_sliding_window",
        "quantization_config",
        "id2label",
    }
    for key in sorted(keys):
        for value in ODD_VALUES:
            try:
                spec = parse_config(base | {"use_sliding_window": True, key: value}, "FOLDER", "score")
            except ValueError as error:
                assert "\n" not in str(error)
            else:
                assert (
                    min(spec.vocab, spec.hidden, spec.layers, spec.kv_heads, spec.num_labels) >= 1 or key == "id2label"
                )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", SPECS)
def test_built_config_describes_the_same_model(name, dtype):
    for head in ("lm", "score", "value"):
        spec = replace(SPECS[name], head=head, num_labels=3 if head == "score" else 1)
        assert parse_config(build_config(spec, dtype, eos_ids=(5,)), "x", head) == spec


def test_labels_of_reward_models(tmp_path):
    for num_labels in (1, 2, 3):
        config = LlamaConfig(**{**LLAMA4, "num_labels": num_labels, "architectures": None, "rope_scaling": None})
        AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / str(num_labels))
        spec = read_spec(tmp_path / str(num_labels), head="score")
        assert spec.num_labels == num_labels
        check_checkpoint(tmp_path / str(num_labels), spec)
        assert has_value_head(tmp_path / str(num_labels)) == (num_labels == 1)


def broken(change):
    """Return (mutation of the folder, words of the message)."""
    return pytest.param(*change[1:], id=change[0])


def _remove(folder: Path, name: str) -> None:
    (folder / name).unlink()


def _rewrite(folder: Path, change) -> None:
    """Replace all weights by one file after `change` of the state dict."""
    state = {}
    for file in sorted(folder.glob("*.safetensors")):
        state |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def _as_bin(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-4])


def _point_outside(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "../other/model.safetensors"
    path.write_text(json.dumps(index))


NORM, BIAS = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias"
BROKEN = [
    ("no folder", shutil.rmtree, "does not exist"),
    ("no config", lambda f: _remove(f, "config.json"), "config.json"),
    ("broken config", lambda f: (f / "config.json").write_text("{"), "config.json is no JSON"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), "JSON object"),
    ("no weights", lambda f: [x.unlink() for x in f.glob("*.safetensors*")], "neither model.safetensors nor"),
    ("bin only", _as_bin, "pytorch_model.bin"),
    ("no index", lambda f: _remove(f, "model.safetensors.index.json"), "model.safetensors.index.json"),
    ("a shard is missing", lambda f: _remove(f, checkpoint_files(f)[1].rsplit("/", 1)[1]), "lacks model-00002"),
    ("path outside", _point_outside, "no file of its folder"),
    ("cut file", _cut, "cut off"),
    ("missing tensor", lambda f: _rewrite(f, lambda s: s.pop(NORM)), NORM),
    ("missing head", lambda f: _rewrite(f, lambda s: s.pop("lm_head.weight")), "tie_word_embeddings"),
    ("shape", lambda f: _rewrite(f, lambda s: s.update({NORM: torch.ones(47)})), NORM),
    ("transposed", lambda f: _rewrite(f, lambda s: s.update({"lm_head.weight": torch.ones(48, 101)})), "lm_head"),
    ("integers", lambda f: _rewrite(f, lambda s: s.update({NORM: torch.ones(48, dtype=torch.int8)})), "I8"),
    ("unused bias", lambda f: _rewrite(f, lambda s: s.update({BIAS: torch.ones(64)})), BIAS),
    ("more layers", lambda f: _rewrite(f, lambda s: s.update({"model.layers.3.x": torch.ones(2)})), "layers.3"),
]


@pytest.mark.parametrize(("mutate", "word"), [broken(case) for case in BROKEN])
def test_broken_folders_are_refused(folder, mutate, word):
    mutate(folder)
    with pytest.raises(ValueError) as caught:
        check_checkpoint(folder, read_spec(folder))
    assert word in str(caught.value) and "\n" not in str(caught.value)


def test_hub_name_and_unknown_store_are_refused():
    for path in ("Qwen/Qwen2.5-0.5B", "nonsense://bucket/model"):
        with pytest.raises(ValueError, match=path):
            read_spec(path)


def test_causal_model_is_no_reward_model(folder):
    with pytest.raises(ValueError, match=r"score\.weight"):
        check_checkpoint(folder, read_spec(folder, head="score"))


def test_folder_behind_a_url(folder, tmp_path):
    url = f"memory://{tmp_path.name}/model"
    fsspec.filesystem("memory").put(str(folder) + "/", url, recursive=True)
    check_checkpoint(url, read_spec(url))
    assert read_spec(url) == read_spec(folder)
    assert fingerprint(url).startswith("xxh3_128:sampled:")


def test_eos_ids(tmp_path):
    def put(name, value):
        (tmp_path / name).write_text(json.dumps(value))

    assert read_eos_ids(tmp_path) == ()
    put("tokenizer.json", {"added_tokens": [{"id": 9, "content": "<end>"}], "model": {"vocab": {"z": 4}}})
    put("tokenizer_config.json", {"eos_token": {"content": "<end>", "lstrip": False}})
    assert read_eos_ids(tmp_path) == (9,)
    put("tokenizer_config.json", {"eos_token": "z"})
    assert read_eos_ids(tmp_path) == (4,)
    put("config.json", {"eos_token_id": 7})
    assert read_eos_ids(tmp_path) == (7,)
    put("generation_config.json", {"eos_token_id": [7, 8]})
    assert read_eos_ids(tmp_path) == (7, 8)
    put("generation_config.json", {"eos_token_id": "seven"})
    with pytest.raises(ValueError, match="seven"):
        read_eos_ids(tmp_path)


def test_fingerprint_sees_weights_and_meaning(folder):
    before = fingerprint(folder)
    assert before.startswith("xxh3_128:full:") and fingerprint(folder) == before
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "6"}, indent=4))
    assert fingerprint(folder) == before
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    changed = fingerprint(folder)
    assert changed != before
    file = Path(checkpoint_files(folder)[0])
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(folder) not in (before, changed)
