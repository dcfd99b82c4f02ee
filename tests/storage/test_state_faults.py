"""A set on an S3 server behind a bad network: written, committed and read in the end, and never committed by halves."""

import pytest
import torch

from storage import retry, shard_writer
from storage.errors import describe_error
from storage.manifest import Manifest
from storage.slices import whole
from storage.small_files import list_names
from storage.state import commit_state, read_state, verify_state
from tests.services.fault_proxy import Fault, gets, puts, run_fault_proxy
from tests.storage.staged_sets import (
    cut,
    read_slices,
    read_whole,
    small_cells,
    small_tensors,
    write_shards,
    write_small_set,
)


@pytest.fixture(scope="module")
def proxy(s3_server):
    with run_fault_proxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def url(s3_url, proxy, monkeypatch):
    """A folder on the S3 server, reached through the proxy, with retries of this code alone."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setitem(retry.retried.__kwdefaults__, "first_wait_s", 0.02)
    proxy.clear()
    yield s3_url
    proxy.clear()


KINDS = ["error", "reset", "lost", "short", "cut", "slow"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".safetensors", "manifest.json", ""])
def test_a_set_is_written_and_read_through_faults(url, proxy, kind, name):
    proxy.inject(Fault(kind, 2, seconds=0.2, matches=lambda method, path: name in path))
    tensors, manifest = write_small_set(url)
    assert kind in {met for _, _, met in proxy.requests}
    proxy.inject(Fault(kind, 2, seconds=0.2, matches=gets(name)))
    outs = read_whole(url, read_state(url))
    assert all(torch.equal(outs[name], tensor) for name, tensor in tensors.items())
    assert verify_state(url) == []
    assert list_names(url) == sorted([*(shard.file for shard in manifest.shards), "manifest.json"])


@pytest.mark.parametrize("kind", ["error", "reset", "short"])
def test_a_shard_in_parts_is_written_through_faults(url, proxy, kind, monkeypatch):
    monkeypatch.setattr(shard_writer, "PUT_BYTES", 2**20)
    monkeypatch.setattr(shard_writer, "PART_BYTES", 5 * 2**20)
    proxy.inject(Fault(kind, 1, matches=puts("partNumber=2")))
    tensors = {"w": torch.randn(12, 2**18)}
    records = write_shards(url, tensors, cut("w", (12, 2**18), None), num_shards=1)
    out = torch.zeros(12, 2**18)
    read_slices(url, records, [(whole("w", (12, 2**18)), out)])
    assert torch.equal(out, tensors["w"])


@pytest.mark.parametrize("kind", ["error", "reset", "short", "cut"])
def test_a_store_that_stays_broken_ends_without_a_commit(url, proxy, kind):
    tensors = small_tensors()
    records = write_shards(url, tensors, small_cells(tensors))
    proxy.inject(Fault(kind, None, matches=lambda method, path: method == "PUT" or kind == "cut"))
    with pytest.raises(OSError) as caught:
        commit_state(url, Manifest("r", 1, {}, {}, tuple(records)))
    assert describe_error(caught.value)
    proxy.clear()
    assert "manifest.json" not in list_names(url)


def test_credentials_that_expire_end_at_once(url, proxy, s3_server):
    tensors, manifest = write_small_set(url)
    proxy.inject(Fault("error", None, 403, "ExpiredToken", message=f"{s3_server.secret} has expired"))
    for action in (
        lambda: write_small_set(f"{url}/other"),
        lambda: read_state(url),
        lambda: read_whole(url, manifest),
    ):
        with pytest.raises(PermissionError) as caught:
            action()
        assert s3_server.secret not in describe_error(caught.value)
    problems = verify_state(url)
    assert len(problems) == 1 and s3_server.secret not in problems[0]
    assert tensors
