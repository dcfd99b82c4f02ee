"""What `inspect` says of runs and of staged sets, whole and damaged, wherever they lie."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

import pytest

import nereus.inspection
from nereus.commits import Commit, read_commit, reading
from nereus.inspection import inspect
from storage.manifest import Manifest
from storage.urls import open_filesystem
from tests.fake_run import FakeRun, flip, tiny_config


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A run directory to be, on each kind of store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3_url')}/run"
    return f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else str(tmp_path / "run")


def make_run(run_dir: str, steps: int = 3) -> FakeRun:
    run = FakeRun(run_dir, tiny_config(run_dir))
    for step in range(steps):
        run.commit(step)
    return run


def remove(url: str) -> None:
    filesystem, path = open_filesystem(url)
    filesystem.rm(path, recursive=True)


def test_a_run_shows_its_commits(place: str):
    run = make_run(place)
    remove(f"{run.root}/step-00000000-1")
    run.write(3)
    found = inspect(f"{place}/", verify=True)
    assert (found.kind, found.run_id, found.steps, found.damage) == ("run", "amber", 5, ())
    assert [(report.step, report.name) for report in found.sets] == [(1, "step-00000001-1"), (2, "step-00000002-1")]
    assert found.retired == ((0, "step-00000000-1"),)
    assert found.uncommitted == ("step-00000003-1",)
    newest = found.sets[-1]
    assert newest.policy_version == 4
    assert newest.plan["actor.training"]["tp"] == 2
    state = run.draw(2)
    for group, tensors in state.items():
        assert newest.groups[group].num_tensors == len(tensors)
        assert newest.groups[group].num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    record = json.loads(json.dumps(found.to_record()))
    assert [report["step"] for report in record["sets"]] == [1, 2]
    assert record["take_overs"] == [{"number": 1, "host": "here", "pid": 1, "flow_run_id": None}]


def test_a_set_alone_and_a_folder_of_sets(place: str):
    run = make_run(place, 2)
    alone = inspect(f"{run.root}/step-00000001-1", verify=True)
    assert (alone.kind, [report.step for report in alone.sets], alone.damage) == ("state", [1], ())
    both = inspect(run.root)
    assert (both.kind, [report.step for report in both.sets]) == ("sets", [0, 1])


def test_a_set_that_is_retired_while_it_is_looked_at_is_no_damage(place: str, monkeypatch: pytest.MonkeyPatch):
    """The journal named the newer commits already when it was read."""
    run = make_run(place)

    def read_late(root: str, commit: Commit) -> Manifest:
        if commit.step == 0:
            remove(f"{run.root}/{commit.set_name}")
        return read_commit(root, commit)

    monkeypatch.setattr(nereus.inspection, "read_commit", read_late)
    found = inspect(place)
    assert found.damage == () and [report.step for report in found.sets] == [1, 2]
    assert found.retired == ((0, "step-00000000-1"),)


def test_every_byte_counts(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 2)
    shard = f"{run.root}/step-00000001-1/{sorted(os.listdir(f'{run.root}/step-00000001-1'))[0]}"
    flip(shard, -5)
    assert inspect(run.run_dir).damage == ()  # manifests alone don't show it
    read = []
    (sentence,) = inspect(run.run_dir, verify=True, on_bytes=read.append).damage
    assert shard in sentence
    assert sum(read) == sum(report.num_bytes for report in inspect(run.run_dir).sets)


@pytest.mark.parametrize("position", [0, 40, 700, -3])
def test_a_flipped_byte_of_a_manifest(tmp_path: Path, position: int):
    run = make_run(str(tmp_path / "run"), 2)
    flip(f"{run.root}/step-00000001-1/manifest.json", position)
    found = inspect(run.run_dir)
    assert [bool(report.damage) for report in found.sets] == [False, True]
    assert "step-00000001-1/manifest.json" in found.damage[0]
    assert inspect(f"{run.root}/step-00000001-1").damage == found.damage


def test_a_set_of_another_commit_in_its_place(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 2)
    remove(f"{run.root}/step-00000001-1")
    os.rename(f"{run.root}/step-00000000-1", f"{run.root}/step-00000001-1")
    gone, swapped = inspect(run.run_dir).damage
    assert gone.endswith("step-00000000-1 is gone, though step 0 was committed there; use another commit.")
    assert "is not the one that was committed for step 1" in swapped


def test_another_set_of_the_same_step_in_its_place(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 2)
    remove(f"{run.root}/step-00000001-1")
    run.identity = {**run.identity, "prompts": "others"}
    run.write(1)
    (sentence,) = inspect(run.run_dir).damage
    assert "is not the one that was committed for step 1" in sentence


def test_a_run_that_went_on_from_an_earlier_step(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 3)
    again = FakeRun(run.run_dir, run.config)
    again.commit(1)
    found = inspect(run.run_dir)
    assert [(report.step, report.name) for report in found.sets] == [(0, "step-00000000-1"), (1, "step-00000001-5")]
    assert found.retired == ((1, "step-00000001-1"), (2, "step-00000002-1"))
    assert [record["number"] for record in found.take_overs] == [1, 5]


def test_a_damaged_journal_is_damage(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 2)
    flip(f"{run.run_dir}/journal/00000002.json", 12)
    found = inspect(run.run_dir)
    assert found.kind == "run"
    assert "journal/00000002.json is damaged" in found.damage[0]


def test_inspecting_leaves_nothing_behind(tmp_path: Path):
    run = make_run(str(tmp_path / "run"), 1)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    inspect(run.run_dir)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_what_is_neither_run_nor_state(tmp_path: Path):
    (tmp_path / "file").touch()
    for place, message in [
        (str(tmp_path), "holds neither a run nor committed state (no manifest.json)"),
        (str(tmp_path / "nowhere"), "holds neither a run nor committed state"),
        (str(tmp_path / "file"), "can't be read (it is, or lies in, a file)"),
        ("nosuch://bucket/run", "can't be read (Protocol not known: nosuch)"),
    ]:
        with pytest.raises(ValueError) as caught:
            inspect(place)
        assert message in str(caught.value)


@pytest.mark.s3
def test_a_reader_without_the_right_to_write_verifies_all_the_same(s3_url: str, s3_server, monkeypatch):
    run = make_run(f"{s3_url}/run", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.reader_secret)
    type(open_filesystem(run.run_dir)[0]).clear_instance_cache()
    try:
        found = inspect(run.run_dir, verify=True)
    finally:
        type(open_filesystem(run.run_dir)[0]).clear_instance_cache()
    assert found.verified and found.damage == ()


@pytest.mark.parametrize("named", ["alone", "with its folder"])
def test_a_set_is_kept_while_it_is_read_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
):
    run = make_run(str(tmp_path / "run"), 1)
    monkeypatch.chdir(run.root if named == "alone" else run.run_dir)
    with reading("step-00000000-1" if named == "alone" else "state/step-00000000-1/"):
        assert [name.partition("@")[0] for name in os.listdir(f"{run.root}/readers")] == ["step-00000000-1"]
