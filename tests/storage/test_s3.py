"""Reading, records and export sources on a real S3 server.

Needs a bucket to write into: NEREUS_TEST_S3=s3://bucket/prefix, the endpoint in AWS_ENDPOINT_URL and credentials.
"""

import os
import uuid

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from storage.records import append_record, keep_records, read_records
from storage.safetensors_file import SafetensorsFile
from storage.slices import TensorSlice

pytestmark = [
    pytest.mark.s3,
    pytest.mark.skipif("NEREUS_TEST_S3" not in os.environ, reason="NEREUS_TEST_S3 names no bucket to write into"),
]


@pytest.fixture
def prefix():
    url = f"{os.environ['NEREUS_TEST_S3'].rstrip('/')}/{uuid.uuid4().hex}"
    yield url
    filesystem, path = fsspec.core.url_to_fs(url)
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def test_slices(prefix, tmp_path):
    weights = torch.randn(3000, 2000)  # 24 MB: several blocks of several ranges
    save_file({"w": weights}, tmp_path / "x")
    filesystem, path = fsspec.core.url_to_fs(f"{prefix}/x.safetensors")
    filesystem.put_file(str(tmp_path / "x"), path)
    with SafetensorsFile(f"{prefix}/x.safetensors") as file:
        for starts, sizes in (((0, 0), (3000, 2000)), ((17, 0), (2500, 2000)), ((0, 700), (3000, 300))):
            out = torch.empty(sizes)
            file.read(TensorSlice("w", starts, sizes), out)
            assert torch.equal(out, weights[starts[0] : starts[0] + sizes[0], starts[1] : starts[1] + sizes[1]])


def test_missing_object(prefix):
    with pytest.raises(OSError):
        SafetensorsFile(f"{prefix}/nothing.safetensors")


def test_records(prefix):
    url = f"{prefix}/metrics.jsonl"
    assert read_records(url) == []
    for step in range(5):
        append_record(url, {"step": step})
    keep_records(url, lambda record: record["step"] < 3)
    append_record(url, {"step": 3})
    assert [record["step"] for record in read_records(url)] == [0, 1, 2, 3]
