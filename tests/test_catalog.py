"""Clusters and models by name."""

import json
from pathlib import Path

import pytest

from nereus.catalog import cluster_preset, list_clusters
from nereus.model.spec import num_parameters
from nereus.presets import list_models, model_preset, read_model


def test_published_clusters_have_their_published_sizes():
    sizes = {name: cluster_preset(name) for name in list_clusters()}
    assert {name: (c.num_nodes, len(c.devices)) for name, c in sizes.items()} == {
        "mi250x-slingshot": (128, 1024),
        "a100-64gb-hdr": (64, 256),
        "h200-hdr": (8, 64),
        "h100-dgx": (16, 128),
    }
    assert sizes["mi250x-slingshot"].kind.inter_node.bandwidth_bytes_s == 100e9
    assert sizes["a100-64gb-hdr"].kind.intra_node.bandwidth_bytes_s == 300e9
    assert sizes["h200-hdr"].kind.memory_bytes == 141e9


def test_more_devices_than_there_are_add_nodes_and_fewer_are_the_first():
    assert cluster_preset("h200-hdr", 128).num_nodes == 16
    small = cluster_preset("a100-64gb-hdr", 6)
    assert small.device_ids == tuple(range(6)) and small.num_nodes == 2


def test_unknown_clusters_and_no_devices_are_refused():
    with pytest.raises(ValueError, match=r"'h300', which there is not; choose one of a100-64gb-hdr, h100-dgx"):
        cluster_preset("h300")
    with pytest.raises(ValueError, match=r"cluster\.devices is 0"):
        cluster_preset("h100-dgx", 0)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3.1-8b", 8.03),
        ("llama-3.3-70b", 70.55),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
        ("smollm2-135m", 0.1345),
    ],
)
def test_models_have_their_published_sizes(name: str, billions: float):
    assert num_parameters(model_preset(name)) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert name in list_models()


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match=r"'gpt', which there is not; choose one of llama-3\.1-8b"):
        model_preset("gpt")


def test_models_are_read_from_a_config(tmp_path: Path):
    config = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == model_preset("smollm2-135m")
    assert read_model(tmp_path, "value").head == "value"


@pytest.mark.parametrize("text", [None, "no json", "[1]", '{"model_type": "gpt2"}'])
def test_broken_configs_are_refused_with_their_path(tmp_path: Path, text: str | None):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        read_model(file)
