"""Slices read from and written into safetensors files equal the same slices of the whole tensors."""

import os
import random
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from storage import safetensors_file
from storage.safetensors_file import SafetensorsFile, SliceWriter, create_file
from storage.slices import TensorSlice, whole

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_part(name: str, shape: tuple[int, ...], rng: random.Random) -> TensorSlice:
    starts, sizes = [], []
    for dim, extent in enumerate(shape):
        start = rng.randint(0, extent) if dim < 2 else 0
        starts.append(start)
        sizes.append(rng.randint(0, extent - start) if dim < 2 else extent)
    return TensorSlice(name, tuple(starts), tuple(sizes))


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """A file on disk, or behind fsspec; returns (url of a copy of the file, is_local)."""

    def put(path: Path) -> str:
        if request.param == "local":
            return str(path)
        url = f"memory://slices-{tmp_path.name}/{path.name}"
        with fsspec.open(url, "wb") as file:
            file.write(path.read_bytes())
        return url

    return put, request.param == "local"


@pytest.mark.parametrize("block_bytes", [64, 2**24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_slices(tmp_path, place, dtype, block_bytes, monkeypatch):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", block_bytes)
    rng = random.Random(0)
    shapes = {"v": (13,), "m": (9, 14), "t": (5, 4, 3), "s": (), "odd": (3, 5000)}
    tensors = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "x.safetensors")
    put, _ = place
    with SafetensorsFile(put(tmp_path / "x.safetensors")) as file:
        for _ in range(60):
            name = rng.choice(list(shapes))
            part = random_part(name, shapes[name], rng)
            out = torch.full(part.sizes, float("nan"), dtype=rng.choice(DTYPES))
            file.read(part, out)
            expected = tensors[name][part.within(whole(name, shapes[name]))].to(out.dtype)
            assert torch.equal(out, expected), (part, out.dtype)


def test_fills_a_view_and_nothing_beside_it(tmp_path):
    full = torch.arange(40.0).view(8, 5)
    save_file({"w": full}, tmp_path / "x")
    target = torch.zeros(8, 7)
    with SafetensorsFile(tmp_path / "x") as file:
        file.read(TensorSlice("w", (2, 1), (3, 4)), target[1:4, 2:6])
    expected = torch.zeros(8, 7)
    expected[1:4, 2:6] = full[2:5, 1:5]
    assert torch.equal(target, expected)


def test_local_reads_only_the_bytes_needed(tmp_path):
    save_file({"w": torch.randn(64, 32)}, tmp_path / "x")
    with SafetensorsFile(tmp_path / "x") as file:
        file.read(TensorSlice("w", (3, 0), (5, 32)), torch.empty(5, 32))
        assert file.bytes_read == 5 * 32 * 4
        file.read(TensorSlice("w", (0, 8), (64, 4)), torch.empty(64, 4))
        assert file.bytes_read == 5 * 32 * 4 + 64 * 4 * 4
        file.read(TensorSlice("w", (0, 8), (0, 4)), torch.empty(0, 4))
        assert file.bytes_read == 5 * 32 * 4 + 64 * 4 * 4


def test_unaligned_foreign_file(tmp_path):
    text = b'{"w":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
    text += b" " * ((5 - len(text)) % 8)  # a legal header that leaves the data on an odd address
    weights = torch.randn(3, 4)
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + weights.numpy().tobytes())
    out = torch.empty(3, 2)
    with SafetensorsFile(tmp_path / "x") as file:
        assert file.header.entries["w"].start % 4
        file.read(TensorSlice("w", (0, 1), (3, 2)), out)
    assert torch.equal(out, weights[:, 1:3])


@pytest.mark.parametrize("block_bytes", [64, 2**24])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_slices_written_by_several_writers_make_the_whole(tmp_path, dtype, block_bytes, monkeypatch):
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", block_bytes)
    path = str(tmp_path / "x.safetensors")
    shapes = {"rows": (9, 8), "columns": (6, 10), "bias": (7,), "scalar": ()}
    tensors = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    create_file(path, {name: (dtype, shape) for name, shape in shapes.items()}, {"format": "pt"})
    parts = [
        [TensorSlice("rows", (0, 0), (4, 8)), TensorSlice("columns", (0, 7), (6, 3)), whole("scalar", ())],
        [TensorSlice("rows", (4, 0), (5, 8)), TensorSlice("columns", (0, 0), (6, 7)), whole("bias", (7,))],
    ]
    written = 0
    with SliceWriter(path) as one, SliceWriter(path) as other:
        for writer, held in zip((one, other), parts, strict=True):
            for part in held:
                written += writer.write(part, tensors[part.name][part.within(whole(part.name, shapes[part.name]))])
    stored = load_file(path)
    assert written == sum(t.numel() for t in tensors.values()) * dtype.itemsize
    assert all(torch.equal(stored[name], tensor.to(dtype)) for name, tensor in tensors.items())


def test_room_is_reserved_at_creation(tmp_path):
    path = tmp_path / "x"
    header = create_file(str(path), {"w": (torch.float32, (1024, 1024))}, {})
    assert path.stat().st_size == header.file_bytes
    assert path.stat().st_blocks * 512 >= 4 * 2**20
    with pytest.raises(FileExistsError):
        create_file(str(path), {"w": (torch.float32, (1,))}, {})


def test_resident_memory_stays_bounded(tmp_path, monkeypatch):
    """Columns of a file far larger than a block are read without the file becoming resident."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 2**20)
    path = str(tmp_path / "x")
    create_file(path, {"w": (torch.float32, (8192, 2048))}, {})  # 64 MiB
    page = os.sysconf("SC_PAGE_SIZE")
    resident, peak = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * page, 0
    out = torch.zeros(8192, 4)
    with SafetensorsFile(path) as file:
        copy = file._map_columns

        def watch(*args):
            nonlocal peak
            copy(*args)
            peak = max(peak, resident())

        monkeypatch.setattr(file, "_map_columns", watch)
        before = resident()
        file.read(TensorSlice("w", (0, 100), (8192, 4)), out)
    assert 0 < peak < before + 24 * 2**20
