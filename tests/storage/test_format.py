"""A reader written from the format's description alone, with json, struct and xxhash, gets the same tensors."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from tests.storage.staged_sets import GROUP, write_small_set

README = Path(__file__).resolve().parents[2] / "storage" / "README.md"
NUMPY = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "BF16": "<u2"}  # numpy has no bfloat16: its bits


def read_by_the_book(folder: Path, group: str) -> dict[str, np.ndarray]:
    text = (folder / "manifest.json").read_bytes()
    assert text.startswith(b'{"format":"nereus-state","version":1,')
    body, end = text[:-47], text[-47:]
    assert end == b',"checksum":"' + xxhash.xxh3_128_hexdigest(body + b"}").encode() + b'"}'
    tensors = {}
    for shard in json.loads(text)["shards"]:
        if shard["group"] != group:
            continue
        data = (folder / shard["file"]).read_bytes()
        assert len(data) == shard["num_bytes"]
        first = min(p["bytes"][0] for t in shard["tensors"].values() for p in t["pieces"])
        assert xxhash.xxh3_128_hexdigest(data[:first]) == shard["header_checksum"]
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        for name, tensor in shard["tensors"].items():
            out = tensors.setdefault(name, np.zeros(tensor["shape"], NUMPY[tensor["dtype"]]))
            for piece in tensor["pieces"]:
                start, stop = piece["bytes"]
                index = 0
                for position, extent in zip(piece["starts"], tensor["shape"], strict=True):
                    index = index * extent + position
                seed = xxhash.xxh3_64_intdigest(f"{name}@{index}".encode())
                assert xxhash.xxh3_64_hexdigest(data[start:stop], seed=seed) == piece["checksum"]
                place = tuple(slice(a, a + n) for a, n in zip(piece["starts"], piece["sizes"], strict=True))
                out[place] = np.frombuffer(data[start:stop], out.dtype).reshape(piece["sizes"])
                key = header[piece["key"]]
                key_start, key_stop = (first + offset for offset in key["data_offsets"])
                assert key["dtype"] == tensor["dtype"]
                assert key_start <= start < stop <= key_stop
                assert key_stop - key_start == math.prod(key["shape"]) * out.itemsize
    return tensors


def test_a_reader_written_from_the_description(tmp_path):
    tensors, _ = write_small_set(str(tmp_path))
    read = read_by_the_book(tmp_path, GROUP)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].shape == tuple(tensor.shape)
        assert read[name].tobytes() == tensor.contiguous().flatten().view(dtype=_bits(tensor)).numpy().tobytes()


def _bits(tensor):
    return torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype


@pytest.mark.parametrize("number", ["0000803f000000c0", "211b67e91e1fe289", "3c5670054e679622"])
def test_the_description_has_the_example_that_is_tested(number):
    assert f"`{number}`" in README.read_text()
    assert number in (Path(__file__).parent / "test_checksums.py").read_text()
