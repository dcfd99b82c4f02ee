"""The stores that every test of the storage room runs on."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

import fsspec
import pytest

STORES = ("disk", "shm", "memory", "s3")


@pytest.fixture(params=STORES)
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A folder of its own, not made yet: on local disk, in shared memory, in fsspec's memory, on a real S3 server."""
    if request.param == "disk":
        yield str(request.getfixturevalue("tmp_path") / "store")
    elif request.param == "shm":
        assert os.path.isdir("/dev/shm"), "this test needs shared memory: mount a tmpfs at /dev/shm"
        with tempfile.TemporaryDirectory(prefix="nereus-test-", dir="/dev/shm") as folder:
            yield f"{folder}/store"
    elif request.param == "memory":
        name = f"memory://{os.path.basename(request.getfixturevalue('tmp_path'))}"
        yield name
        filesystem = fsspec.filesystem("memory")
        if filesystem.exists(name):
            filesystem.rm(name, recursive=True)
    else:
        yield request.getfixturevalue("s3_url")


@pytest.fixture
def lock_folder(tmp_path, monkeypatch):
    """The place for temporary files, of this test alone: where the locks of remote runs lie."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder
