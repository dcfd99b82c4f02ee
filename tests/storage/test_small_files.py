"""Small files, the same on every store."""

import os

import pytest

from storage import small_files
from storage.small_files import (
    file_exists,
    list_names,
    read_file,
    read_files,
    remove_file,
    remove_files,
    remove_folder,
    replace_file,
)


def test_round_trip(store_url):
    url = f"{store_url}/a/b"
    assert not file_exists(url)
    for data in (b"1", b"", b"x" * 100_000):
        replace_file(url, data)
        assert read_file(url) == data
    assert file_exists(url)
    remove_file(url)
    remove_file(url)
    assert not file_exists(url)
    with pytest.raises(FileNotFoundError):
        read_file(url)


def test_a_folder_is_listed_by_names(store_url):
    assert list_names(store_url) == []
    for name in ("b", "a", "folder/c", "folder/d"):
        replace_file(f"{store_url}/{name}", name.encode())
    assert list_names(store_url) == ["a", "b", "folder"]
    assert list_names(f"{store_url}/folder/") == ["c", "d"]
    replace_file(f"{store_url}/folder/e", b"")  # no stale listing
    assert list_names(f"{store_url}/folder") == ["c", "d", "e"]
    assert list_names(f"{store_url}/a/nothing") == []


def test_many_are_read_in_order_and_removed(store_url):
    urls = [f"{store_url}/{number}" for number in range(40)]
    for number, url in enumerate(urls):
        replace_file(url, str(number).encode())
    assert read_files(urls) == [str(number).encode() for number in range(40)]
    remove_files([*urls, f"{store_url}/nothing"])
    assert list_names(store_url) == []
    with pytest.raises(FileNotFoundError):
        read_files(urls)


def test_a_folder_goes_when_it_is_empty(store_url):
    replace_file(f"{store_url}/kept", b"")
    replace_file(f"{store_url}/folder/x", b"")
    assert not remove_folder(f"{store_url}/folder")
    assert list_names(store_url) == ["folder", "kept"]
    remove_file(f"{store_url}/folder/x")
    assert remove_folder(f"{store_url}/folder")
    assert list_names(store_url) == ["kept"]


def test_too_large_is_not_read_whole(store_url, monkeypatch):
    replace_file(f"{store_url}/x", b"x" * 1001)
    monkeypatch.setattr(small_files, "MAX_BYTES", 1001)
    assert len(read_file(f"{store_url}/x")) == 1001
    monkeypatch.setattr(small_files, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1000 bytes"):
        read_file(f"{store_url}/x")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "x")
    with pytest.raises(ValueError, match="no plain file"):
        read_file(tmp_path / "x")


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    replace_file(tmp_path / "x", b"old")

    def refuse(*args):
        raise OSError("full")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        replace_file(tmp_path / "x", b"new")
    assert read_file(tmp_path / "x") == b"old"
    assert list_names(tmp_path) == ["x"]
