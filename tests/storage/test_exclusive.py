"""One writer of many creates a file, whole and durable, on every store."""

import errno
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from storage import exclusive
from storage.exclusive import create_exclusively, make_folder, remove_leftovers
from storage.small_files import list_names, read_file
from tests.services.processes import start_python

WRITERS = 8


def test_one_of_eight_threads_wins(store_url):
    url = f"{store_url}/new/folder/x"
    ready = threading.Barrier(WRITERS)

    def create(number):
        ready.wait()
        try:
            create_exclusively(url, str(number).encode())
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(WRITERS) as threads:
        winners = [number for number in threads.map(create, range(WRITERS)) if number is not None]
    assert len(winners) == 1
    assert read_file(url) == str(winners[0]).encode()
    assert list_names(f"{store_url}/new/folder") == ["x"]


def test_fsspecs_memory_store_has_one_winner_though_it_looks_first_and_writes_then(tmp_path, monkeypatch):
    exists = MemoryFileSystem.exists

    def take_time(self, name):
        found = exists(self, name)
        time.sleep(0.01)
        return found

    monkeypatch.setattr(MemoryFileSystem, "exists", take_time)
    test_one_of_eight_threads_wins(f"memory://{tmp_path.name}")


def test_one_of_eight_processes_wins(tmp_path):
    url = str(tmp_path / "x")
    code = """
        import sys
        from storage.exclusive import create_exclusively
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            create_exclusively(sys.argv[1], sys.argv[2].encode())
            print("won")
        except FileExistsError:
            print("lost")
    """
    writers = [start_python(code, url, str(number), stdin=subprocess.PIPE) for number in range(WRITERS)]
    assert {writer.stdout.readline() for writer in writers} == {"ready\n"}
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    said = [writer.communicate(timeout=60)[0].strip() for writer in writers]
    assert sorted(said) == ["lost"] * (WRITERS - 1) + ["won"]
    assert read_file(url) == str(said.index("won")).encode()


def test_the_second_is_told(store_url):
    create_exclusively(f"{store_url}/x", b"1")
    with pytest.raises(FileExistsError):
        create_exclusively(f"{store_url}/x", b"1")
    assert read_file(f"{store_url}/x") == b"1"


def test_everything_is_synced_before_the_name_is_there(tmp_path, monkeypatch):
    calls = []
    fsync, link = os.fsync, os.link

    def note_fsync(fd):
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
        fsync(fd)

    def note_link(source, target):
        calls.append(("link", os.path.basename(target)))
        link(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "link", note_link)
    create_exclusively(tmp_path / "new" / "x", b"1")
    assert [kind for kind, _ in calls] == ["fsync", "fsync", "link", "fsync"]
    assert calls[0][1] == tmp_path.name  # the new folder's own name
    assert calls[1][1].startswith(".x.")
    assert calls[3][1] == "new"


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def refuse(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        create_exclusively(tmp_path / "x", b"1")
    assert list_names(tmp_path) == []


def test_what_killed_writers_left_goes_with_the_file_that_is_there(tmp_path):
    mine, other = f".x.{'0' * 32}.new", f".y.{'0' * 32}.new"
    for name in (mine, other, ".x.new", "x.new", ".hidden"):
        (tmp_path / name).touch()
    create_exclusively(tmp_path / "x", b"1")
    assert list_names(tmp_path) == [".hidden", ".x.new", other, "x", "x.new"]
    (tmp_path / "y").touch()
    remove_leftovers(str(tmp_path))
    assert list_names(tmp_path) == [".hidden", ".x.new", "x", "x.new", "y"]


def test_a_loser_whose_temporary_file_the_winner_removed_is_told(tmp_path, monkeypatch):
    link = os.link

    def be_late(source, target):
        if not os.path.exists(target):
            Path(target).write_bytes(b"winner")
            os.unlink(source)
        link(source, target)

    monkeypatch.setattr(os, "link", be_late)
    with pytest.raises(FileExistsError):
        create_exclusively(tmp_path / "x", b"loser")
    assert read_file(tmp_path / "x") == b"winner"


def test_file_systems_without_links_have_one_winner_too(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    create_exclusively(tmp_path / "x", b"1")
    with pytest.raises(FileExistsError):
        create_exclusively(tmp_path / "x", b"2")
    assert read_file(tmp_path / "x") == b"1"
    assert list_names(tmp_path) == ["x"]


def test_a_path_without_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    create_exclusively("x", b"1")
    make_folder("a/b")
    assert list_names(tmp_path) == ["a", "x"]


@pytest.mark.parametrize(("is_there", "expected"), [(True, FileExistsError), (False, OSError)])
def test_einval_means_taken_only_where_the_object_is_there(tmp_path, monkeypatch, is_there, expected):
    filesystem = fsspec.filesystem("memory")
    url = f"memory://{tmp_path.name}/x"
    if is_there:
        create_exclusively(url, b"1")

    def refuse(*args, **kwargs):
        raise OSError(errno.EINVAL, "a precondition failed")

    monkeypatch.setattr(filesystem, "pipe_file", refuse)
    with pytest.raises(OSError, match="precondition" if not is_there else "exists") as caught:
        create_exclusively(url, b"2")
    assert type(caught.value) is expected


@pytest.mark.parametrize("same", [True, False])
def test_a_lost_answer_is_no_lost_race(tmp_path, monkeypatch, same):
    """The first put arrives and its answer is lost; the second finds an object: ours, or one of a faster writer."""
    filesystem = fsspec.filesystem("memory")
    url = f"memory://{tmp_path.name}/x"
    pipe_file = filesystem.pipe_file
    lost = []

    def lose_first(name, data, **kwargs):
        if not lost:
            lost.append(name)
            pipe_file(name, data if same else b"other")
            raise ConnectionResetError("reset")
        pipe_file(name, data, **kwargs)

    monkeypatch.setattr(filesystem, "pipe_file", lose_first)
    monkeypatch.setattr(exclusive, "retried", lambda action: retry_at_once(action))
    if same:
        create_exclusively(url, b"1")
    else:
        with pytest.raises(FileExistsError):
            create_exclusively(url, b"1")
    assert len(lost) == 1


def retry_at_once(action):
    try:
        return action()
    except ConnectionError:
        return action()
