"""Hostile and broken safetensors headers are refused by name, in bounded memory."""

import json
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from storage.safetensors_file import SafetensorsFile
from storage.safetensors_header import MAX_HEADER_BYTES, build_header


def write(path: Path, header: object, data_bytes: int = 0) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data_bytes))
    return str(path)


def entry(shape=(2,), start=0, stop=8, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


HOSTILE = {
    "overlap": ({"a": entry(), "b": entry(start=4, stop=12)}, 12, "overlaps"),
    "same range": ({"a": entry(), "b": entry()}, 8, "overlaps"),
    "hole": ({"a": entry(), "b": entry(start=12, stop=20)}, 20, "hole"),
    "hole at the start": ({"a": entry(start=4, stop=12)}, 12, "hole"),
    "negative offset": ({"a": entry(start=-8, stop=0)}, 8, "byte range"),
    "backward": ({"a": entry(start=8, stop=0)}, 8, "needs 8 bytes"),
    "outside the file": ({"a": entry()}, 4, "cut off"),
    "trailing bytes": ({"a": entry()}, 12, "its header describes"),
    "wrong size": ({"a": entry(shape=(3,))}, 8, "needs 12 bytes"),
    "huge shape": ({"a": entry(shape=(2**62, 2**62))}, 8, "needs"),
    "float in the shape": ({"a": entry(shape=(2.0,))}, 8, "shape"),
    "true in the shape": ({"a": entry(shape=(True, 2))}, 8, "shape"),
    "bad dtype": ({"a": entry(dtype="F12")}, 8, "F12"),
    "dtype that is a list": ({"a": entry(dtype=["F32"])}, 8, "dtype"),
    "no description": ({"a": 3}, 0, "no description"),
    "three offsets": ({"a": {**entry(), "data_offsets": [0, 4, 8]}}, 8, "byte range"),
    "no JSON": (b"{not json", 0, "can't be read"),
    "no UTF-8": (b'{"\xff\xfe": 1}', 0, "can't be read"),
    "deep nesting": (b"[" * 100_000, 0, "can't be read"),
    "no map": ([1, 2], 0, "list"),
    "name given twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        1,
        "twice",
    ),
    "metadata of numbers": ({"__metadata__": {"x": 1}}, 0, "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refuses_hostile_header(tmp_path, case):
    header, data_bytes, word = HOSTILE[case]
    path = write(tmp_path / "x.safetensors", header, data_bytes)
    with pytest.raises(ValueError, match=word) as caught:
        SafetensorsFile(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(("prefix", "word"), [(b"", "too few"), (b"\x01\x02", "too few")])
def test_refuses_short_file(tmp_path, prefix, word):
    (tmp_path / "x").write_bytes(prefix)
    with pytest.raises(ValueError, match=word):
        SafetensorsFile(tmp_path / "x")


@pytest.mark.parametrize("length", [2**63 + 5, 2**40, MAX_HEADER_BYTES + 1, 1000])
def test_huge_header_length_is_refused_unread(tmp_path, length):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(200 if length == 1000 else 2 * MAX_HEADER_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="header"):
            SafetensorsFile(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_flipped_bytes_never_lead_outside_the_file(tmp_path):
    save_file({"first": torch.arange(6.0).view(2, 3), "second": torch.ones(4)}, tmp_path / "x")
    good, rng = (tmp_path / "x").read_bytes(), random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        data[rng.randrange(8 + good[0])] = rng.randrange(256)
        (tmp_path / "x").write_bytes(data)
        try:
            with SafetensorsFile(tmp_path / "x") as file:
                entries = file.header.entries.values()
        except ValueError:
            continue
        assert all(8 <= e.start <= e.stop <= len(good) for e in entries)
        assert sum(e.stop - e.start for e in entries) == 40


def test_reads_what_the_library_writes(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3), "scalar": torch.tensor(7), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    with SafetensorsFile(tmp_path / "x") as file:
        assert {name: e.shape for name, e in file.header.entries.items()} == {
            "a": (2, 3),
            "scalar": (),
            "empty": (0, 4),
        }
        assert file.header.metadata == {"format": "pt"}


def test_library_reads_what_we_build(tmp_path):
    data, header = build_header({"a": (torch.float32, (2, 3)), "b": (torch.bfloat16, ())}, {"format": "pt"})
    (tmp_path / "x").write_bytes(data + bytes(header.file_bytes - len(data)))
    with safe_open(tmp_path / "x", "pt") as file:
        assert set(file.keys()) == {"a", "b"} and file.get_tensor("a").shape == (2, 3)
    assert all(e.start % 2 == 0 for e in header.entries.values())
