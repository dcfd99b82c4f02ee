"""Retention: what has to go goes, what is needed stays, and a kill in the middle harms nothing."""

import os

import pytest

from storage import heartbeat, retention
from storage.retention import being_read, discard_set, retire
from storage.small_files import file_exists, list_names, read_file, remove_file, replace_file
from storage.urls import open_filesystem
from tests.services.processes import running_python

LEASE_S = 30.0
READER = """
    import sys, time
    from storage.retention import being_read
    with being_read(sys.argv[1], "step-00000000-1"):
        print("reads", flush=True)
        time.sleep(600)
"""


def make_set(root, name, *, committed=True):
    for file in ("a.safetensors", "b.safetensors", ".c.safetensors.0.writing"):
        replace_file(f"{root}/{name}/{file}", b"x")
    if committed:
        replace_file(f"{root}/{name}/manifest.json", b"{}")


@pytest.fixture(autouse=True)
def no_markers_seen(monkeypatch):
    monkeypatch.setattr(retention, "_seen", {})


def test_what_is_neither_kept_nor_own_goes(store_url):
    for step, take_over in ((0, 1), (1, 1), (2, 1), (2, 2), (3, 2)):
        make_set(store_url, f"step-{step:08d}-{take_over}")
    make_set(store_url, "step-00000003-1", committed=False)  # of a killed writer
    make_set(store_url, "step-00000004-2", committed=False)
    keep = ["step-00000002-2", "step-00000003-2"]
    gone = retire(store_url, keep=keep, own=["step-00000004-2"], lease_s=LEASE_S)
    assert gone == ["step-00000000-1", "step-00000001-1", "step-00000002-1", "step-00000003-1"]
    assert list_names(store_url) == [*keep, "step-00000004-2"]
    assert len(list_names(f"{store_url}/step-00000003-2")) == 4
    assert retire(store_url, keep=keep, own=["step-00000004-2"], lease_s=LEASE_S) == []


def test_a_set_that_its_writer_gives_up_goes(store_url):
    make_set(store_url, "step-00000000-1")
    make_set(store_url, "step-00000001-1")
    for _ in range(2):
        discard_set(store_url, "step-00000001-1")
        assert list_names(store_url) == ["step-00000000-1"]
    with pytest.raises(ValueError, match="is no name of a staged set"):
        discard_set(store_url, "../step-00000000-1")


def test_what_transitions_have_staged_for_themselves_goes_when_asked_for(store_url):
    names = ["transition-00000001-1.7", "transition-00000003-2.8", "transition-00000003-2.9", "transition-00000004-3.1"]
    for name in ["step-00000002-2", *names]:
        make_set(store_url, name, committed=name != names[2])
    assert retire(store_url, keep=["step-00000002-2"], lease_s=LEASE_S) == []
    assert list_names(store_url) == ["step-00000002-2", *names]
    keep = {"keep": ["step-00000002-2"], "lease_s": LEASE_S, "transitions": True}
    assert retire(store_url, own=[names[1]], **keep) == [names[0], names[2]]
    assert retire(store_url, **keep) == [names[1]]
    assert list_names(store_url) == ["step-00000002-2", names[3]]  # of a later take-over


def test_a_set_of_a_transition_is_discarded_by_its_name(store_url):
    make_set(store_url, "transition-00000001-1.7")
    make_set(store_url, "transition-00000001-1.8")
    for _ in range(2):
        discard_set(store_url, "transition-00000001-1.7")
        assert list_names(store_url) == ["transition-00000001-1.8"]
    for name in ("transition-00000001-1", "transition-1-1.8", "transition-00000001-1.8/..", "transition-00000001-1."):
        with pytest.raises(ValueError, match="is no name of a staged set"):
            discard_set(store_url, name)


def test_nothing_there_is_nothing_to_do(store_url):
    assert retire(store_url, keep=[], lease_s=LEASE_S) == []
    assert list_names(store_url) == []


def test_sets_of_a_later_take_over_stay(store_url):
    """A driver that was taken over and doesn't know it yet removes nothing of the new one's."""
    for name in ("step-00000000-1", "step-00000001-1", "step-00000001-2"):
        make_set(store_url, name)
    assert retire(store_url, keep=["step-00000001-1"], lease_s=LEASE_S) == ["step-00000000-1"]
    assert retire(store_url, keep=[], lease_s=LEASE_S) == []
    assert retire(store_url, keep=[], lease_s=LEASE_S, take_over=1) == ["step-00000001-1"]
    assert list_names(store_url) == ["step-00000001-2"]


def test_what_is_no_set_stays(store_url):
    others = ["step-1-1", "step-00000000", "step-00000000-1.bak", "transition-00000001-1", "notes", "step-00000000-x"]
    others += ["transition-1-1.1", "transition-00000001-1.1.bak"]
    for name in others:
        make_set(store_url, name)
    replace_file(f"{store_url}/manifest.json", b"{}")
    assert retire(store_url, keep=[], lease_s=LEASE_S, take_over=9, transitions=True) == []
    assert list_names(store_url) == sorted([*others, "manifest.json"])


def test_folders_inside_a_set_are_not_ours(store_url):
    make_set(store_url, "step-00000000-1")
    replace_file(f"{store_url}/step-00000000-1/folder/x", b"x")
    assert retire(store_url, keep=[], lease_s=LEASE_S, take_over=1) == []
    assert list_names(f"{store_url}/step-00000000-1") == ["folder"]
    assert file_exists(f"{store_url}/step-00000000-1/folder/x")


@pytest.mark.parametrize("name", ["../step-00000000-1", "step-00000000-1/..", "", ".", "/", "step-0-1", "x"])
def test_names_that_lead_outside_are_refused(store_url, name):
    for action in (
        lambda: retire(store_url, keep=[name], lease_s=LEASE_S),
        lambda: retire(store_url, keep=[], own=[name], lease_s=LEASE_S),
        lambda: being_read(store_url, name).__enter__(),
    ):
        with pytest.raises(ValueError, match="no name of a staged set"):
            action()


def test_links_are_not_followed(tmp_path):
    root, outside = tmp_path / "state", tmp_path / "outside"
    make_set(tmp_path, "outside")
    make_set(root, "step-00000001-1")
    (root / "step-00000000-1").symlink_to(outside)
    (root / "step-00000001-1" / "link").symlink_to(outside / "manifest.json")
    (root / "step-00000001-1" / "folder").symlink_to(outside)
    (root / "step-00000002-1").write_bytes(b"a file")
    assert retire(str(root), keep=[], lease_s=LEASE_S, take_over=1) == ["step-00000001-1"]
    assert list_names(root) == ["step-00000000-1", "step-00000002-1"]
    assert len(list_names(outside)) == 4


def test_a_kill_in_the_middle_leaves_no_set_and_the_rest_goes_next_time(store_url, monkeypatch):
    make_set(store_url, "step-00000000-1")
    removed = []

    class Killed(BaseException):
        pass

    def die_at_second(url):
        if removed:
            raise Killed
        removed.append(url)
        remove_file(url)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(retention, "remove_file", die_at_second)
        patch.setattr(retention, "remove_files", lambda urls: [die_at_second(url) for url in urls])
        retire(store_url, keep=[], lease_s=LEASE_S, take_over=1)
    assert removed == [f"{store_url}/step-00000000-1/manifest.json"]
    assert len(list_names(f"{store_url}/step-00000000-1")) == 3
    assert retire(store_url, keep=[], lease_s=LEASE_S, take_over=1) == ["step-00000000-1"]
    assert list_names(store_url) == []


def test_a_set_stays_while_it_is_read(store_url):
    for step in range(3):
        make_set(store_url, f"step-{step:08d}-1")
    keep = ["step-00000002-1"]
    with being_read(store_url, "step-00000000-1"), being_read(store_url, "step-00000000-1"):
        assert retire(store_url, keep=keep, lease_s=LEASE_S) == ["step-00000001-1"]
        assert len(list_names(f"{store_url}/step-00000000-1")) == 4
    assert list_names(store_url) == ["step-00000000-1", "step-00000002-1"]  # no marker is left
    assert retire(store_url, keep=keep, lease_s=LEASE_S) == ["step-00000000-1"]


def test_a_reader_that_comes_while_the_manifest_goes_keeps_the_shards(store_url, monkeypatch):
    make_set(store_url, "step-00000000-1")
    readers = []

    def come(url):
        reader = being_read(store_url, "step-00000000-1")
        reader.__enter__()
        readers.append(reader)
        remove_file(url)

    with monkeypatch.context() as patch:
        patch.setattr(retention, "remove_file", come)
        assert retire(store_url, keep=[], lease_s=LEASE_S, take_over=1) == []
    assert len(list_names(f"{store_url}/step-00000000-1")) == 3
    readers[0].__exit__(None, None, None)
    assert retire(store_url, keep=[], lease_s=LEASE_S, take_over=1) == ["step-00000000-1"]


def test_a_living_reader_of_another_process_is_respected_and_a_dead_one_expires(tmp_path, monkeypatch):
    root, name = str(tmp_path / "state"), "step-00000000-1"
    make_set(root, name)
    now = [0.0]
    monkeypatch.setattr(retention.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(retention, "has_died", lambda identity: False)  # as if it were on another host
    with running_python(READER, root, until="reads"):
        assert retire(root, keep=[], lease_s=LEASE_S, take_over=1) == []
        (marker,) = list_names(f"{root}/readers")
    now[0] = LEASE_S - 1
    assert retire(root, keep=[], lease_s=LEASE_S, take_over=1) == []
    replace_file(f"{root}/readers/{marker}", b"a sign of life")
    now[0] = LEASE_S + 1
    assert retire(root, keep=[], lease_s=LEASE_S, take_over=1) == []
    now[0] = 2 * LEASE_S + 2
    assert retire(root, keep=[], lease_s=LEASE_S, take_over=1) == [name]
    assert list_names(root) == []


def test_a_dead_reader_of_this_host_holds_nothing(tmp_path):
    root, name = str(tmp_path / "state"), "step-00000000-1"
    make_set(root, name)
    with running_python(READER, root, until="reads"):
        assert retire(root, keep=[], lease_s=LEASE_S, take_over=1) == []
        (marker,) = list_names(f"{root}/readers")
        torn = f"{root}/readers/.{marker}.{'0' * 32}.new"
        replace_file(torn, read_file(f"{root}/readers/{marker}"))
        replace_file(f"{root}/readers/.{marker}.{'1' * 32}.new", b"")  # nobody knows whose
    assert retire(root, keep=[], lease_s=LEASE_S, take_over=1) == [name]
    assert list_names(f"{root}/readers") == [f".{marker}.{'1' * 32}.new"]


def test_readers_beat(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "_BEAT_S", 0.01)
    make_set(tmp_path, "step-00000000-1")
    with being_read(str(tmp_path), "step-00000000-1"):
        (marker,) = list_names(tmp_path / "readers")
        first = (tmp_path / "readers" / marker).read_bytes()
        while (tmp_path / "readers" / marker).read_bytes() == first:
            pass


def test_a_store_that_may_only_be_read_is_read(store_url, monkeypatch):
    make_set(store_url, "step-00000000-1")

    def refuse(*args, **kwargs):
        raise PermissionError("Access Denied.")

    monkeypatch.setattr(heartbeat, "replace_file", refuse)
    with being_read(store_url, "step-00000000-1"):
        pass


def test_reading_makes_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError), being_read(str(tmp_path / "state"), "step-00000000-1"):
        pass
    assert os.listdir(tmp_path) == []


def test_unfinished_uploads_of_a_set_are_given_up(s3_url):
    filesystem, folder = open_filesystem(s3_url)
    bucket, prefix, _ = filesystem.split_path(folder)
    for name in ("step-00000000-1", "step-00000001-1"):
        make_set(s3_url, name)
        filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key=f"{prefix}/{name}/large")
    retire(s3_url, keep=["step-00000001-1"], lease_s=LEASE_S)
    uploads = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")["Uploads"]
    assert [upload["Key"] for upload in uploads] == [f"{prefix}/step-00000001-1/large"]
