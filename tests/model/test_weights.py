"""Shards filled slice by slice hold exactly what the whole model holds, and read no more than that."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from nereus.layout import Layout, slices_of
from nereus.model.checkpoint import read_spec
from nereus.model.decoder import DecoderShard
from nereus.model.spec import ModelSpec, tensors
from nereus.model.weights import CheckpointSource, FreshHead, RandomSource, WeightSource, load_shard, open_weights
from storage.slices import TensorSlice, whole
from tests.model.decoder_cases import SPECS, hf_model

LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 3) for pp in (1, 2, 3)]


class OneOf:
    """A tensor-parallel group of one rank that never communicates."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def layouts_of(spec: ModelSpec) -> list[Layout]:
    return [layout for layout in LAYOUTS if layout.tp <= spec.kv_heads and layout.pp <= spec.layers]


def read_all(spec: ModelSpec, source: WeightSource, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    result = {}
    for name, info in tensors(spec).items():
        result[name] = torch.empty(info.shape, dtype=dtype)
        source.read(whole(name, info.shape), result[name])
    return result


def cut(state: dict[str, torch.Tensor], part: TensorSlice) -> torch.Tensor:
    return state[part.name][part.within(whole(part.name, tuple(state[part.name].shape)))]


@pytest.fixture(scope="module", params=SPECS)
def saved(request, tmp_path_factory):
    """(folder, spec, state dict by canonical name) of one family."""
    path = tmp_path_factory.mktemp(request.param)
    model = hf_model(SPECS[request.param])
    model.save_pretrained(path, max_shard_size="60KB")
    return str(path), read_spec(path), model.state_dict()


def test_slices_of_every_layout(saved):
    path, spec, state = saved
    rng = random.Random(1)
    for layout in layouts_of(spec):
        for rank in range(layout.size):
            source = CheckpointSource(path, spec)
            wanted = slices_of(spec, layout, rank)
            for part in wanted:
                out = torch.empty(part.sizes, dtype=rng.choice([torch.float64, torch.float32, torch.bfloat16]))
                source.read(part, out)
                assert torch.equal(out, cut(state, part).to(out.dtype)), (layout, rank, part)
            assert source.bytes_read == 4 * sum(part.num_elements for part in wanted)
            source.close()


def test_shards_hold_the_model(saved):
    path, spec, state = saved
    for layout in layouts_of(spec):
        for rank in range(layout.size):
            group = OneOf(layout.tp_rank(rank), layout.tp)
            shard = DecoderShard(spec, layout, rank, group=group, dtype=torch.float32, device="meta").to_empty(
                device="cpu"
            )
            with torch.no_grad():
                for parameter in shard.parameters():
                    parameter.fill_(float("nan"))
            load_shard(shard, CheckpointSource(path, spec))
            parameters = dict(shard.named_parameters())
            assert not any(p.isnan().any() for p in parameters.values())
            for view in shard.views():
                assert torch.equal(view.of(parameters[view.parameter]), cut(state, view.slice)), (layout, rank, view)


def test_names_without_prefix(saved, tmp_path):
    path, spec, state = saved
    hf = {name.removeprefix("model."): t.clone() for name, t in state.items() if name in tensors(spec)}
    save_file(hf, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(Path(path, "config.json").read_text())
    loaded = read_all(spec, CheckpointSource(str(tmp_path), spec))
    assert all(torch.equal(loaded[name], state[name]) for name in tensors(spec))


def test_tied_embedding_stored_as_head(tmp_path):
    spec, model = SPECS["smollm2"], hf_model(SPECS["smollm2"])
    model.save_pretrained(tmp_path)
    state = {name: t.clone() for name, t in model.state_dict().items() if name != "model.embed_tokens.weight"}
    save_file(state, tmp_path / "model.safetensors")
    loaded = read_all(spec, CheckpointSource(str(tmp_path), spec))
    assert torch.equal(loaded["model.embed_tokens.weight"], model.state_dict()["lm_head.weight"])


def test_reward_model(tmp_path):
    config = hf_model(SPECS["qwen3"]).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(tmp_path)
    spec = read_spec(tmp_path, head="score")
    loaded = read_all(spec, CheckpointSource(str(tmp_path), spec))
    assert set(loaded) == set(model.state_dict())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    critic = read_spec(tmp_path, head="value")  # a critic that starts from its reward model
    source = open_weights(str(tmp_path), critic, seed=0, role="critic")
    assert torch.equal(read_all(critic, source)["value_head.weight"], loaded["score.weight"])


def test_random_source_is_the_same_on_every_layout():
    spec = replace(SPECS["qwen2"], initializer_range=0.1)
    source = RandomSource(spec, 3, "actor")
    state = read_all(spec, source, torch.float64)
    for layout in layouts_of(spec):
        for rank in range(layout.size):
            for part in slices_of(spec, layout, rank):
                out = torch.empty(part.sizes, dtype=torch.float64)
                source.read(part, out)
                assert torch.equal(out, cut(state, part)), (layout, rank, part)
    for name, tensor in state.items():
        if name.endswith(".bias"):
            assert not tensor.any()
        elif "norm" in name:
            assert (tensor == 1).all()
        else:
            assert 0.08 < tensor.std() < 0.12 and abs(tensor.mean()) < 0.02
    other_role, other_seed = RandomSource(spec, 3, "critic"), RandomSource(spec, 4, "actor")
    for other in (other_role, other_seed):
        assert not torch.equal(read_all(spec, other, torch.float64)["lm_head.weight"], state["lm_head.weight"])


def test_random_source_draws_in_pieces(monkeypatch):
    spec = SPECS["llama"]
    expected = read_all(spec, RandomSource(spec, 0, "actor"))
    monkeypatch.setattr("nereus.model.weights._DRAW_ELEMENTS", 100)
    again = read_all(spec, RandomSource(spec, 0, "actor"))
    assert all(torch.equal(expected[name], again[name]) for name in expected)


def test_fresh_head_keeps_the_backbone(saved):
    path, spec, state = saved
    value = replace(spec, head="value")
    loaded = read_all(value, open_weights(path, value, seed=5, role="critic"))
    assert all(torch.equal(loaded[name], state[name]) for name in loaded if name != "value_head.weight")
    head = FreshHead(RandomSource(spec, 0, "actor"), value, 5, "critic")
    assert torch.equal(read_all(value, head)["value_head.weight"], loaded["value_head.weight"])
    assert loaded["value_head.weight"].shape == (1, spec.hidden) and loaded["value_head.weight"].std() > 0
