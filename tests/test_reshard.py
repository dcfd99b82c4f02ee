"""Staged state and checkpoints, rewritten for other layouts: every number stays, files are laid out anew."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModel, AutoModelForCausalLM

import nereus.reshard
from nereus.inspection import inspect
from nereus.layout import Layout, slices_of
from nereus.model.spec import tensors
from nereus.reshard import reshard
from storage.manifest import DamagedState
from storage.slices import whole
from storage.state import read_state, verify_state
from storage.state_reader import StateReader
from storage.urls import open_filesystem
from tests.fake_run import FakeRun, Groups, flip, plan_of, tiny_config
from tests.model.decoder_cases import SPECS, hf_model


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    made = FakeRun(str(tmp_path / "run"), tiny_config(str(tmp_path / "run")))
    made.commit(0)
    made.commit(1)
    return made


def read_all(url: str) -> Groups:
    manifest = read_state(url)
    groups: Groups = {}
    for group in manifest.groups:
        held = {name: torch.empty(meta.shape) for name, meta in manifest.tensors_of(group).items()}
        wanted = [(whole(name, tuple(tensor.shape)), tensor) for name, tensor in held.items()]
        with StateReader(url, group, wanted) as reader:
            for shard in manifest.shards_of(group):
                reader.feed(shard)
            reader.finish()
        groups[group] = held
    return groups


def assert_same(found: Groups, wanted: Groups) -> None:
    assert {group: set(held) for group, held in found.items()} == {group: set(held) for group, held in wanted.items()}
    for group, held in wanted.items():
        assert all(torch.equal(found[group][name], tensor) for name, tensor in held.items())


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (2, 2), (4, 3)])
def test_state_keeps_parameters_moments_and_run_state(run: FakeRun, tmp_path: Path, tp: int, pp: int):
    out = str(tmp_path / "out")
    seen = []
    done = reshard(run.run_dir, out, tp=tp, pp=pp, on_progress=lambda done, total: seen.append((done, total)))
    assert verify_state(out) == []
    assert_same(read_all(out), run.draw(1))
    before, after = read_state(f"{run.root}/step-00000001-1"), read_state(out)
    assert (after.run_id, after.step, after.run_state) == (before.run_id, before.step, before.run_state)
    entry = after.plan["actor.training"]
    assert (entry["dp"], entry["tp"], entry["pp"], entry["devices"]) == (1, tp, pp, list(range(tp * pp)))
    assert sorted(done.files) == sorted(os.listdir(out))
    assert seen[-1][0] == seen[-1][1] == sum(t.nbytes for held in run.draw(1).values() for t in held.values())
    (report,) = inspect(out, verify=True).sets
    assert report.policy_version == 2


def test_a_rank_finds_all_of_its_bytes_in_its_own_files(run: FakeRun, tmp_path: Path):
    out, layout = str(tmp_path / "out"), Layout(2, 3)
    reshard(run.run_dir, out, tp=2, pp=3)
    spec = run.specs["actor.training"]
    for shard in read_state(out).shards_of("actor.training"):
        rank = int(shard.file.split("-")[1])
        held = {part.name: part for part in slices_of(spec, layout, rank)}
        for piece in shard.pieces:
            mine = held[piece.part.name.removeprefix("exp_avg/").removeprefix("exp_avg_sq/")]
            named = type(mine)(piece.part.name, mine.starts, mine.sizes)
            assert named.intersect(piece.part) == piece.part


@settings(max_examples=6, deadline=None)
@given(
    st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2)),
    st.tuples(st.integers(1, 4), st.integers(1, 3)),
)
def test_there_and_back(tmp_path_factory, written: tuple[int, int, int], wanted: tuple[int, int]):
    tmp_path = tmp_path_factory.mktemp("reshard")
    tp, pp, dp = written
    run = FakeRun(str(tmp_path / "run"), tiny_config(str(tmp_path / "run")), plan_of(Layout(tp, pp), dp))
    name = run.commit(3).set_name
    reshard(f"{run.root}/{name}", str(tmp_path / "there"), tp=wanted[0], pp=wanted[1])
    reshard(str(tmp_path / "there"), str(tmp_path / "back"), tp=tp, pp=pp)
    assert_same(read_all(str(tmp_path / "there")), run.draw(3))
    assert_same(read_all(str(tmp_path / "back")), run.draw(3))


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_state_to_a_checkpoint_that_transformers_loads(run: FakeRun, tmp_path: Path, role: str):
    out = str(tmp_path / "out")
    done = reshard(f"{run.root}/step-00000001-1", out, tp=1, pp=3, to="hf", role=role)
    assert any("no tokenizer" in note for note in done.notes)
    assert sum(name.endswith(".safetensors") for name in done.files) == 3
    kind = AutoModelForCausalLM if role == "actor" else AutoModel
    state = kind.from_pretrained(out).state_dict()
    prefix = "" if role == "actor" else "model."
    drawn = run.draw(1)[f"{role}.training"]
    names = [name for name in tensors(run.specs[f"{role}.training"]) if name != "value_head.weight"]
    assert all(torch.equal(state[name.removeprefix(prefix)], drawn[name]) for name in names)


def test_a_run_as_source_brings_its_tokenizer(run: FakeRun, tmp_path: Path):
    done = reshard(run.run_dir, str(tmp_path / "out"), tp=1, pp=1, to="hf")
    assert done.notes == () and "tokenizer.json" in done.files


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm2"])
def test_a_checkpoint_to_state_and_back(tmp_path: Path, name: str):
    source, model = str(tmp_path / "source"), hf_model(SPECS[name])
    model.save_pretrained(source)
    layout = {"tp": SPECS[name].kv_heads, "pp": 2}
    reshard(source, str(tmp_path / "state"), **layout)
    assert verify_state(str(tmp_path / "state")) == []
    reshard(str(tmp_path / "state"), str(tmp_path / "hf"), **layout, to="hf")
    reshard(source, str(tmp_path / "straight"), **layout, to="hf")
    for folder in ("hf", "straight"):
        state = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("store", ["memory", pytest.param("s3", marks=pytest.mark.s3)])
def test_other_stores(request: pytest.FixtureRequest, run: FakeRun, tmp_path: Path, store: str):
    base = request.getfixturevalue("s3_url") if store == "s3" else f"memory://{uuid.uuid4().hex}"
    reshard(run.run_dir, f"{base}/state", tp=2, pp=1)
    assert verify_state(f"{base}/state") == []
    reshard(f"{base}/state", f"{base}/hf", tp=1, pp=1, to="hf")
    filesystem, path = open_filesystem(f"{base}/hf")
    filesystem.get(path, str(tmp_path / "hf"), recursive=True)
    state = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    drawn = run.draw(1)["actor.training"]
    assert all(torch.equal(tensor, drawn[name]) for name, tensor in state.items())


def test_a_damaged_commit_of_a_run_gives_way_to_the_one_before(run: FakeRun, tmp_path: Path):
    folder = f"{run.root}/step-00000001-1"
    shards = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    flip(f"{folder}/{shards[-1]}", -1)
    done = reshard(run.run_dir, str(tmp_path / "out"), tp=1, pp=1)
    assert shards[-1] in done.notes[0]
    assert_same(read_all(str(tmp_path / "out")), run.draw(0))
    with pytest.raises(DamagedState):
        reshard(folder, str(tmp_path / "alone"), tp=1, pp=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 5, "pp": 1}, "tp=5 is more than the model's 4 KV heads; choose tp <= 4."),
        ({"tp": 1, "pp": 4}, "pp=4 is more than the model's 3 layers; choose pp <= 3."),
        ({"tp": 0, "pp": 1}, "tp=0 pp=1 is no layout; both must be at least 1."),
    ],
)
def test_a_layout_that_the_model_does_not_allow(run: FakeRun, tmp_path: Path, arguments: dict, message: str):
    for to in ("state", "hf"):
        with pytest.raises(ValueError) as caught:
            reshard(run.run_dir, str(tmp_path / "out"), to=to, **arguments)
        assert str(caught.value) == message
    assert os.listdir(tmp_path) == ["run"]


def test_places_that_will_not_do(run: FakeRun, tmp_path: Path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for source, target, message in [
        (run.run_dir, str(tmp_path / "full"), "is not empty; give a new directory"),
        (str(tmp_path / "full"), str(tmp_path / "out"), "holds neither staged state (manifest.json), nor a run"),
        (str(tmp_path / "nowhere"), str(tmp_path / "out"), "holds neither staged state"),
        ("nosuch://x", str(tmp_path / "out"), "can't be read (Protocol not known: nosuch)"),
    ]:
        with pytest.raises(ValueError) as caught:
            reshard(source, target, tp=1, pp=1)
        assert message in str(caught.value)


def test_a_copy_that_fails_leaves_nothing(run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nereus.reshard, "commit_state", refuse)
    for target in (str(tmp_path / "out"), f"memory://{uuid.uuid4().hex}/out"):
        with pytest.raises(ValueError, match=r"No space left on device\); nothing is left of the copy"):
            reshard(run.run_dir, target, tp=1, pp=1)
        filesystem, path = open_filesystem(target)
        assert not filesystem.exists(path)
    assert os.listdir(tmp_path) == ["run"]


def test_memory_is_bounded_by_a_shard(tmp_path: Path):
    """In a process of its own, since the peak is the kernel's count of it."""
    code = """
import gc, re, sys
from pathlib import Path
from nereus.reshard import reshard
from nereus.layout import Layout
from tests.fake_run import FakeRun, plan_of, tiny_config

def peak() -> int:
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

run_dir, out = sys.argv[1:]
tiny = {"hidden": 512, "heads": 8, "kv_heads": 4, "layers": 3, "intermediate": 2048}
FakeRun(run_dir, tiny_config(run_dir, model={"tiny": tiny}), plan_of(Layout(2, 1)), max_shard_bytes=2**26).commit(0)
gc.collect()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = peak()
reshard(run_dir, out, tp=1, pp=3)
reshard(out, out + "-hf", tp=1, pp=3, to="hf")
print(peak() - before)
"""
    arguments = [sys.executable, "-c", code, str(tmp_path / "run"), str(tmp_path / "out")]
    root = Path(__file__).parents[1]
    measured = subprocess.run(arguments, cwd=root, check=True, capture_output=True, text=True)
    assert read_state(str(tmp_path / "out")).num_bytes > 250 * 2**20
    assert int(measured.stdout) < 140 * 2**20
