"""Every wait for S3 ends: at servers that take a connection and then do nothing more."""

import socket

import pytest

from storage import s3
from storage.retry import is_transient
from storage.urls import open_filesystem


@pytest.fixture
def client(monkeypatch):
    """A client of a server that takes connections, never reads and never answers; and the limits are short."""
    monkeypatch.setattr("storage.urls.SHORT_TIMEOUTS", {"connect_timeout": 0.3, "read_timeout": 0.3})
    monkeypatch.setattr(s3, "_BACKOFF_S", 1.0)
    monkeypatch.setattr(s3, "SLOWEST_BYTES_PER_S", 2**30)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "some-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "some-secret")
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield open_filesystem("s3://bucket/x", patient=False)[0]
        s3.BoundedS3FileSystem.clear_instance_cache()


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.cat_file("bucket/x", 0, 10),
        lambda client: client.ls("bucket/x"),
        lambda client: client.rm_file("bucket/x"),
        lambda client: client.pipe_file("bucket/x", b"small"),
        lambda client: client.pipe_file("bucket/x", b"small", mode="create"),
        lambda client: client.pipe_file("bucket/x", bytes(32 * 2**20)),  # more than fits into the connection
    ],
    ids=["get", "list", "delete", "put", "create", "large put"],
)
def test_a_server_that_does_nothing_is_given_up(client, call):
    with pytest.raises(Exception) as caught:  # and this test has its own limit
        call(client)
    assert is_transient(caught.value)
