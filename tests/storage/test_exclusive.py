"""One writer of many creates a file."""

import errno
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from storage.exclusive import create_exclusively


def test_one_of_many_wins(tmp_path):
    url = str(tmp_path / "new" / "folder" / "x")

    def create(number):
        try:
            create_exclusively(url, str(number).encode())
        except FileExistsError:
            return None
        return number

    with ThreadPoolExecutor(8) as threads:
        winners = [number for number in threads.map(create, range(32)) if number is not None]
    assert len(winners) == 1
    assert fsspec.open(url).open().read() == str(winners[0]).encode()


def test_an_object_is_created_once(tmp_path):
    url = f"memory://{tmp_path.name}/x"
    create_exclusively(url, b"1")
    with pytest.raises(FileExistsError):
        create_exclusively(url, b"2")


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
