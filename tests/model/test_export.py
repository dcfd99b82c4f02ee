"""What is exported slice by slice is what transformers loads, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import stat
import tempfile
from dataclasses import replace

import fsspec
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from nereus.layout import Layout, owned_slices
from nereus.model.checkpoint import check_checkpoint, read_spec
from nereus.model.export import abandon_export, begin_export, finish_export, write_slices
from nereus.model.spec import tensors
from nereus.model.weights import CheckpointSource
from storage.slices import whole
from tests.model.decoder_cases import SPECS, hf_model, random_ids


def export(url, spec, state, *, layout=Layout(1, 1), dtype=torch.float32, **options):
    """Export a state dict as the ranks of a layout would: each its own slices, with a plan that was sent to it."""
    plan = begin_export(str(url), spec, dtype=dtype, **options)
    written = 0
    for rank in range(layout.size):
        parts = [
            (part, state[part.name][part.within(whole(part.name, tuple(state[part.name].shape)))])
            for part in sorted(owned_slices(spec, layout, rank))
        ]
        written += write_slices(pickle.loads(pickle.dumps(plan)), parts)
    finish_export(plan, written_bytes=written)
    return plan


@pytest.fixture(scope="module", params=SPECS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    model = hf_model(SPECS[request.param])
    model.save_pretrained(path)
    return model, read_spec(path), str(path)


@pytest.mark.parametrize("max_file_bytes", [50_000, 5 * 10**9])
@pytest.mark.parametrize("keeps_config", [True, False])
def test_transformers_loads_the_same_model(model, tmp_path, keeps_config, max_file_bytes):
    theirs, spec, source = model
    layout = Layout(2, 3) if keeps_config else Layout(1, 2)
    options = {"config_from": source if keeps_config else None, "max_file_bytes": max_file_bytes}
    export(tmp_path / "out", spec, theirs.state_dict(), layout=layout, **options)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    state = loaded.state_dict()
    assert loaded.dtype == torch.float32 and set(state) == set(theirs.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())
    ids = random_ids(spec, 20).view(1, -1)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(ids).logits, theirs(ids).logits)
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == (max_file_bytes == 50_000)
    assert read_spec(tmp_path / "out") == spec
    check_checkpoint(tmp_path / "out", spec)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes(model, tmp_path, dtype):
    theirs, spec, source = model
    state = {name: tensor.double() for name, tensor in theirs.state_dict().items()}
    export(tmp_path / "out", spec, state, layout=Layout(2, 1), dtype=dtype, config_from=source)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == dtype
    assert all(torch.equal(tensor, state[name].to(dtype)) for name, tensor in loaded.state_dict().items())


def test_reward_model_and_critic(tmp_path):
    spec = replace(SPECS["llama"], head="score")
    state = {name: torch.randn(info.shape) for name, info in tensors(spec).items()}
    export(tmp_path / "reward", spec, state, layout=Layout(2, 2))
    reward = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert all(torch.equal(tensor, state[name]) for name, tensor in reward.state_dict().items())
    assert read_spec(tmp_path / "reward", head="score") == spec

    spec = replace(SPECS["llama"], head="value")
    state["value_head.weight"] = torch.randn(1, spec.hidden)
    export(tmp_path / "critic", spec, state, layout=Layout(2, 2))
    assert read_spec(tmp_path / "critic", head="value") == spec
    out = torch.empty(1, spec.hidden)
    CheckpointSource(str(tmp_path / "critic"), spec).read(whole("value_head.weight", (1, spec.hidden)), out)
    assert torch.equal(out, state["value_head.weight"])
    backbone = AutoModel.from_pretrained(tmp_path / "critic").state_dict()
    assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in backbone.items())


@pytest.fixture
def small(tmp_path):
    """(spec, state dict, folder with tokenizer files) of a small model."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 3, "content": "E"}]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "E"}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    spec = replace(SPECS["llama"], layers=1)
    return spec, {name: torch.randn(info.shape) for name, info in tensors(spec).items()}, str(folder)


def test_side_files(small, tmp_path):
    spec, state, tokenizer = small
    source = tmp_path / "source"
    hf_model(spec).save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_evil.X"}, "note": 1}))
    (source / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    export(tmp_path / "out", spec, state, config_from=str(source), tokenizer_from=tokenizer)
    assert sorted(os.listdir(tmp_path / "out")) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["note"] == 1 and "auto_map" not in written
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755
    export(tmp_path / "built", spec, state, tokenizer_from=tokenizer)
    assert json.loads((tmp_path / "built" / "config.json").read_text())["eos_token_id"] == 3


def test_object_store(small, tmp_path):
    spec, state, tokenizer = small
    url = f"memory://{tmp_path.name}/out"
    former = {name: tensor + 1 for name, tensor in state.items()}
    for replaced, weights in ((False, former), (True, state)):
        plan = export(url, spec, weights, tokenizer_from=tokenizer, max_file_bytes=20_000, replace=replaced)
        assert not os.path.exists(plan.folder)
        check_checkpoint(url, read_spec(url))
    names = fsspec.filesystem("memory").ls(url, detail=False)
    assert f"/{tmp_path.name}/out/tokenizer.json" in names
    out = torch.empty(tuple(state["model.norm.weight"].shape))
    CheckpointSource(url, spec).read(whole("model.norm.weight", tuple(out.shape)), out)
    assert torch.equal(out, state["model.norm.weight"])
    with pytest.raises(ValueError, match="exists already"):
        export(url, spec, state)


def test_what_is_there_is_not_overwritten(small, tmp_path):
    spec, state, _ = small
    (tmp_path / "out").mkdir()
    export(tmp_path / "out", spec, state)  # an empty folder is no obstacle
    with pytest.raises(ValueError, match="exists already"):
        export(tmp_path / "out", spec, state)
    export(tmp_path / "out", spec, {name: tensor * 2 for name, tensor in state.items()}, replace=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert torch.equal(loaded["lm_head.weight"], state["lm_head.weight"] * 2)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="holds no model"):
        export(tmp_path / "mine", spec, state, replace=True)
    assert (tmp_path / "mine" / "thesis.tex").exists()
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_nothing_is_left_after_a_failure(small, tmp_path, monkeypatch):
    spec, state, _ = small
    plan = begin_export(str(tmp_path / "out"), spec, dtype=torch.float32)
    assert os.path.dirname(plan.folder) == str(tmp_path) and not (tmp_path / "out").exists()
    abandon_export(plan)
    with pytest.raises(ValueError, match="does not exist"):
        export(tmp_path / "out", spec, state, config_from=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="another model"):
        hf_model(SPECS["qwen2"]).save_pretrained(tmp_path / "other")
        export(tmp_path / "out", spec, state, config_from=str(tmp_path / "other"))

    export(tmp_path / "out", spec, state)

    def fail(source, target, real=os.rename):
        if str(target) == str(tmp_path / "out") and ".partial-" in os.path.basename(source):
            raise OSError("no")
        return real(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="no"):
        export(tmp_path / "out", spec, state, replace=True)
    check_checkpoint(tmp_path / "out", spec)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("place", ["local", "object store"])
def test_leftovers_of_killed_exporters_are_removed(small, tmp_path, monkeypatch, place):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where those for object stores lie
    spec, state, _ = small
    out = str(tmp_path / "out") if place == "local" else f"memory://{tmp_path.name}/left"
    living = begin_export(out, spec, dtype=torch.float32)
    dead = living.folder.replace(f"-{os.getpid()}-", "-999999999-")
    os.mkdir(dead)
    export(out, spec, state)
    assert not os.path.exists(dead) and os.path.exists(living.folder)
    abandon_export(living)


def test_unwritten_bytes_are_noticed(small, tmp_path):
    spec, state, _ = small
    plan = begin_export(str(tmp_path / "out"), spec, dtype=torch.float32)
    written = write_slices(plan, [(whole("model.norm.weight", (spec.hidden,)), state["model.norm.weight"])])
    with pytest.raises(AssertionError):
        finish_export(plan, written_bytes=written)
    assert not (tmp_path / "out").exists()
