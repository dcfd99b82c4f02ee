"""Exports of a run, from any commit: what `transformers` loads is what was committed, bit for bit."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from nereus.config import load_config
from nereus.export import export_run
from nereus.model.spec import tensors
from nereus.origin import NoCommit
from nereus.runtime.session import Session
from storage.state import read_state
from storage.urls import open_filesystem
from tests.fake_run import FakeRun, flip, tiny_config
from tests.runtime.steps import run_step


def make_run(run_dir: str, steps: int = 2, **keys) -> FakeRun:
    run = FakeRun(run_dir, tiny_config(run_dir, **keys))
    for step in range(steps):
        run.commit(step)
    return run


def assert_is(run: FakeRun, out: str, step: int, role: str = "actor") -> None:
    kind = AutoModelForCausalLM if role == "actor" else AutoModel
    state = kind.from_pretrained(out, dtype="auto").state_dict()
    group = f"{role}.training"
    drawn = run.draw(step)[group]
    prefix = "" if role == "actor" else "model."
    for name in tensors(run.specs[group]):
        if name != "value_head.weight":
            assert torch.equal(state[name.removeprefix(prefix)], drawn[name]), name


@pytest.mark.parametrize("store", ["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_newest_commit_or_another(request: pytest.FixtureRequest, tmp_path: Path, store: str, role: str):
    base = {"local": str(tmp_path), "memory": f"memory://{uuid.uuid4().hex}"}.get(store)
    run = make_run(f"{base or request.getfixturevalue('s3_url')}/run")
    seen: list[tuple[int, int]] = []
    newest = export_run(run.run_dir, str(tmp_path / "a"), role=role, on_progress=lambda *state: seen.append(state))
    first = export_run(run.run_dir, str(tmp_path / "b"), role=role, step=0)
    assert (newest.step, first.step, newest.notes) == (1, 0, ())
    assert seen[-1][0] == seen[-1][1] > 0
    assert sorted(newest.files) == sorted(os.listdir(tmp_path / "a"))
    assert_is(run, str(tmp_path / "a"), 1, role)
    assert_is(run, str(tmp_path / "b"), 0, role)
    assert AutoTokenizer.from_pretrained(tmp_path / "a").decode([4, 5]) == "ae"


def test_float64_stays_float64(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 1, precision="float64")
    export_run(run.run_dir, str(tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.float64
    assert_is(run, str(tmp_path / "out"), 0)


def test_to_an_object_store(tmp_path: Path):
    run, out = make_run(str(tmp_path / "run")), f"memory://{uuid.uuid4().hex}/out"
    export_run(run.run_dir, out)
    filesystem, path = open_filesystem(out)
    filesystem.get(path, str(tmp_path / "out"), recursive=True)
    assert_is(run, str(tmp_path / "out"), 1)


def test_it_is_what_the_run_itself_ends_with(tmp_path: Path):
    """A run with real workers: its export and its own final/ are the same bytes and give the same greedy tokens."""
    run_dir = str(tmp_path / "run")
    config = load_config(
        "tiny-cpu",
        ["steps=2", "model.tiny={hidden: 32, layers: 2, heads: 4, kv_heads: 2, intermediate: 32}",
         "rollout={prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 8}",
         "plan={actor.generation: {}, actor.training: {tp: 2}, critic.training: {pp: 2}, reference.inference: {}}",
         "cluster.memory_per_device=1GiB", f"run_dir={run_dir}"],
    )  # fmt: skip
    with Session.open(config, run_id="amber") as session:
        for step in session.steps:
            run_step(session, step)
            session.stage_state(step)
        session.finish()
    assert export_run(run_dir, str(tmp_path / "out")).step == 1
    mine, own = tmp_path / "out", tmp_path / "run" / "final"
    assert {file.name: file.read_bytes() for file in mine.iterdir()} == {f.name: f.read_bytes() for f in own.iterdir()}
    ids = torch.tensor([[4, 5, 6]])
    greedy = {
        folder: AutoModelForCausalLM.from_pretrained(folder).generate(ids, max_new_tokens=6, do_sample=False).tolist()
        for folder in (mine, own)
    }
    assert greedy[mine] == greedy[own]
    export_run(run_dir, str(tmp_path / "critic"), role="critic")
    assert AutoModel.from_pretrained(tmp_path / "critic").config.hidden_size == 32


def test_a_damaged_commit_gives_way_to_the_one_before_and_is_named(tmp_path: Path):
    run = make_run(str(tmp_path / "run"))
    folder = f"{run.root}/step-00000001-1"
    shard, position = next(
        (record.file, piece.start)
        for record in read_state(folder).shards_of("actor.training")
        for piece in record.pieces
        if piece.part.name == "model.norm.weight"
    )
    flip(f"{folder}/{shard}", position)
    done = export_run(run.run_dir, str(tmp_path / "out"))
    assert done.step == 0 and shard in done.notes[0]
    assert_is(run, str(tmp_path / "out"), 0)
    with pytest.raises(NoCommit, match=r"holds no step 1 that is intact: .*is damaged"):
        export_run(run.run_dir, str(tmp_path / "other"), step=1)
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]


def test_final_is_copied_where_no_commit_is_left(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 1)
    export_run(run.run_dir, f"{run.run_dir}/final")
    shutil.rmtree(run.root)
    done = export_run(run.run_dir, str(tmp_path / "out"))
    assert done.step is None and "is gone" in done.notes[0]
    assert_is(run, str(tmp_path / "out"), 0)
    with pytest.raises(NoCommit, match=r"holds no commit that is intact"):
        export_run(run.run_dir, str(tmp_path / "critic"), role="critic")


def test_wrong_input(tmp_path: Path):
    run = make_run(str(tmp_path / "run"))
    empty = FakeRun(str(tmp_path / "empty"), tiny_config(str(tmp_path / "empty")))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    out = str(tmp_path / "out")
    for arguments, keys, message in [
        ((run.run_dir, out), {"step": 7}, "has no commit of step 7; those it has are of 0, 1."),
        ((empty.run_dir, out), {}, "holds no commit yet; wait for the end of its first step."),
        ((str(tmp_path / "full"), out), {}, "holds no finished run (no final/config.json)"),
        ((str(tmp_path / "full"), out), {"step": 1}, "holds no run with commits"),
        ((run.run_dir, str(tmp_path / "full")), {}, "is not empty; give a new directory."),
        (("nosuch://x", out), {}, "nosuch://x can't be read (Protocol not known: nosuch)"),
        ((run.run_dir, "nosuch://x"), {}, "nosuch://x can't be read (Protocol not known: nosuch)"),
        ((run.run_dir, out), {"role": "reward"}, "role is 'reward'; it must be actor or critic."),
    ]:
        with pytest.raises(ValueError) as caught:
            export_run(*arguments, **keys)
        assert message in str(caught.value)
    assert not os.path.exists(out)
