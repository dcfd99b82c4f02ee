"""A set is committed by its manifest, once; what is not whole is not committed and not read."""

import errno
import os
from dataclasses import replace

import pytest
import torch

from storage import state
from storage.errors import describe_error
from storage.manifest import DamagedState, Manifest
from storage.shard_reader import ShardReader
from storage.slices import whole
from storage.small_files import list_names, read_file, remove_file, replace_file
from storage.state import commit_state, read_state, verify_state
from tests.storage.staged_sets import read_slices, small_cells, small_tensors, write_shards, write_small_set


def test_a_commit_on_every_store(store_url):
    _, manifest = write_small_set(store_url)
    assert list_names(store_url) == sorted([*(shard.file for shard in manifest.shards), "manifest.json"])
    checksum = commit_state(store_url, manifest)  # again: the same manifest is there already
    stored = read_state(store_url, checksum=checksum)
    assert stored == manifest
    assert stored.checksum == checksum
    counted = []
    assert verify_state(store_url, on_bytes=counted.append) == []
    assert sum(counted) == manifest.num_bytes


def test_verifying_takes_one_read_for_many_pieces(tmp_path, monkeypatch):
    """On an object store each is a request."""
    _, manifest = write_small_set(str(tmp_path / "set"))
    assert sum(len(shard.pieces) for shard in manifest.shards) > 2 * len(manifest.shards)
    reads, read = [], ShardReader.read

    def note(self, pieces, buffer):
        reads.append(self.record.file)
        read(self, pieces, buffer)

    monkeypatch.setattr(ShardReader, "read", note)
    assert verify_state(tmp_path / "set") == []
    assert sorted(reads) == sorted(shard.file for shard in manifest.shards)


def test_another_manifest_is_not_overwritten(store_url):
    _, manifest = write_small_set(store_url)
    before = read_file(f"{store_url}/manifest.json")
    with pytest.raises(FileExistsError):
        commit_state(store_url, replace(manifest, step=manifest.step + 1))
    assert read_file(f"{store_url}/manifest.json") == before


def test_without_all_its_shards_a_set_is_not_committed(store_url):
    tensors = small_tensors()
    records = write_shards(store_url, tensors, small_cells(tensors))
    manifest = Manifest("run", 1, {}, {}, tuple(records))
    data = read_file(f"{store_url}/{records[1].file}")
    for damaged in (data[:-1], data + b"x", b"", None):
        if damaged is None:
            remove_file(f"{store_url}/{records[1].file}")
        else:
            replace_file(f"{store_url}/{records[1].file}", damaged)
        with pytest.raises(DamagedState, match=f"{records[1].file} is damaged: it "):
            commit_state(store_url, manifest)
    assert "manifest.json" not in list_names(store_url)
    with pytest.raises(DamagedState, match=r"manifest.json is damaged: the file is missing"):
        read_state(store_url)


def test_a_manifest_that_contradicts_itself_is_not_written(tmp_path):
    tensors = small_tensors()
    records = write_shards(str(tmp_path), tensors, small_cells(tensors))
    for wrong in (records[:1], [records[0], records[0]], [records[0], replace(records[1], pieces=())]):
        with pytest.raises(DamagedState):
            commit_state(tmp_path, Manifest("run", 1, {}, {}, tuple(wrong)))
    assert not (tmp_path / "manifest.json").exists()


def test_a_set_without_shards_is_a_set(store_url):
    """A run without trained model-stages has nothing but its run state."""
    commit_state(store_url, Manifest("run", 0, {"x": 1}, {}, ()))
    assert read_state(store_url).run_state == {"x": 1}
    assert verify_state(store_url) == []


def test_the_manifest_of_another_commit_is_told(tmp_path):
    write_small_set(str(tmp_path / "a"))
    checksum = read_state(tmp_path / "a").checksum
    write_small_set(str(tmp_path / "b"), seed=1)
    os.replace(tmp_path / "b" / "manifest.json", tmp_path / "a" / "manifest.json")
    with pytest.raises(DamagedState, match="another manifest than the one committed"):
        read_state(tmp_path / "a", checksum=checksum)
    assert verify_state(tmp_path / "a") != []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "link to a folder"])
@pytest.mark.parametrize("name", ["manifest.json", "actor.training-0.safetensors"])
def test_only_plain_files_are_read(tmp_path, kind, name):
    """A link may lead out of the run's folder, and a pipe would be waited for."""
    _, manifest = write_small_set(str(tmp_path / "set"))
    path = tmp_path / "set" / name
    os.replace(path, tmp_path / "moved")
    if kind == "link":
        path.symlink_to(tmp_path / "moved")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path)
    assert "a link, a pipe or a folder" in verify_state(tmp_path / "set")[0]
    with pytest.raises(DamagedState, match="a link, a pipe or a folder"):
        if name == "manifest.json":
            read_state(tmp_path / "set")
        else:
            out = torch.zeros(12, 10)
            read_slices(str(tmp_path / "set"), manifest.shards, [(whole("rows", (12, 10)), out)])


def test_a_full_disk_leaves_no_half_a_manifest(tmp_path, monkeypatch):
    tensors = small_tensors()
    manifest = Manifest("run", 1, {}, {}, tuple(write_shards(str(tmp_path), tensors, small_cells(tensors))))
    names = sorted(os.listdir(tmp_path))
    fsync, calls = os.fsync, []

    def fail(fd):
        calls.append(fd)
        if len(calls) == 2:  # the first is of the folder with the shards
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        commit_state(tmp_path, manifest)
    assert sorted(os.listdir(tmp_path)) == names
    commit_state(tmp_path, manifest)
    assert verify_state(tmp_path) == []


def test_names_of_shards_are_on_the_disk_before_the_manifest(tmp_path, monkeypatch):
    tensors = small_tensors()
    manifest = Manifest("run", 1, {}, {}, tuple(write_shards(str(tmp_path), tensors, small_cells(tensors))))
    done = []
    sync, create = state.sync_folder, state.create_exclusively
    monkeypatch.setattr(state, "sync_folder", lambda path: (done.append("sync"), sync(path)))
    monkeypatch.setattr(state, "create_exclusively", lambda url, data: (done.append("create"), create(url, data)))
    commit_state(tmp_path, manifest)
    assert done == ["sync", "create"]


def test_credentials_in_a_url_are_in_no_sentence(tmp_path):
    with pytest.raises(DamagedState) as caught:
        read_state("memory://user:secret@nowhere/set")
    assert "secret" not in describe_error(caught.value)
    assert "secret" not in str(caught.value)
