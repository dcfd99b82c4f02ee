"""A shard is an ordinary safetensors file of what its tensors held when it was finished, or it is not there."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from storage import shard_writer, whole_file
from storage.safetensors_header import DTYPES
from storage.shard_writer import ShardWriter
from storage.slices import TensorSlice, whole
from storage.small_files import list_names, read_file
from storage.urls import open_filesystem
from tests.storage.staged_sets import GROUP, cut, read_slices, small_cells, small_tensors, take

FILE = "a.safetensors"


def write_one(url, tensors, cells):
    writer = ShardWriter(url, group=GROUP, file=FILE)
    for cell in cells:
        writer.add(cell, tuple(tensors[cell.name].shape), take(tensors, cell))
    return writer.finish_shard()


def test_a_shard_on_every_store(store_url):
    tensors = small_tensors()
    record = write_one(store_url, tensors, small_cells(tensors))
    data = read_file(f"{store_url}/{FILE}")
    assert list_names(store_url) == [FILE]
    assert len(data) == record.num_bytes
    stored = load(data)
    assert torch.equal(stored["rows"], tensors["rows"])  # four adjacent pieces are one key
    assert [(piece.key, piece.part.starts) for piece in record.pieces if piece.part.name == "rows"] == [
        ("rows", (0, 0)),
        ("rows", (3, 0)),
        ("rows", (5, 0)),
        ("rows", (6, 0)),
    ]
    assert torch.equal(stored["columns@2"], tensors["columns"][:, 2:4])
    assert torch.equal(stored["half"], tensors["half"])
    assert torch.equal(stored["bias"], tensors["bias"])
    assert torch.equal(stored["updates"], tensors["updates"])
    assert "nothing" not in stored
    assert record.tensors["nothing"].shape == (0, 4)
    for piece in record.pieces:
        assert (
            data[piece.start : piece.stop]
            == take(tensors, piece.part).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )


def test_rows_that_are_not_adjacent_are_keys_of_their_own(tmp_path):
    tensors = {"w": torch.randn(10, 3)}
    cells = cut("w", (10, 3), 0, (2, 4, 7))
    record = write_one(str(tmp_path), tensors, [cells[3], cells[0], cells[2]])
    assert [(piece.key, piece.part.starts[0]) for piece in record.pieces] == [("w@0", 0), ("w@4", 4), ("w@4", 7)]
    assert torch.equal(load((tmp_path / FILE).read_bytes())["w@4"], tensors["w"][4:])


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path, name):
    dtype = DTYPES[name]
    tensors = {"w": torch.randint(0, 2, (5, 7)).to(dtype), "odd": torch.zeros(3, dtype=torch.uint8)}
    record = write_one(str(tmp_path), tensors, [*cut("odd", (3,), None), *cut("w", (5, 7), 1, (2,))])
    assert record.tensors["w"].dtype == name
    stored = load((tmp_path / FILE).read_bytes())
    assert torch.equal(stored["w@2"].view(torch.uint8), tensors["w"][:, 2:].contiguous().view(torch.uint8))
    assert all(piece.start % dtype.itemsize == 0 for piece in record.pieces if piece.part.name == "w")


@pytest.mark.parametrize("block_bytes", [8, 100, 2**20])
def test_strided_tensors(tmp_path, monkeypatch, block_bytes):
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", block_bytes)
    base = torch.randn(6, 8, 10)
    tensors = {
        "t": base.permute(2, 0, 1),
        "r": base[:, ::2, 1:4],
        "g": base.clone().requires_grad_(),
        "e": base.expand(6, 8, 10),
    }
    record = write_one(str(tmp_path), tensors, [whole(name, tuple(t.shape)) for name, t in tensors.items()])
    stored = load((tmp_path / FILE).read_bytes())
    assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())
    outs = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}
    read_slices(str(tmp_path), [record], [(whole(name, tuple(out.shape)), out) for name, out in outs.items()])
    assert all(torch.equal(outs[name], tensor) for name, tensor in tensors.items())


def test_tensors_are_read_when_the_shard_is_finished(tmp_path):
    weights = torch.zeros(4)
    writer = ShardWriter(tmp_path, group=GROUP, file=FILE)
    writer.add(whole("w", (4,)), (4,), weights)
    assert writer.num_bytes == 16
    assert not any(tmp_path.iterdir())
    weights += 1
    writer.finish_shard()
    assert torch.equal(load((tmp_path / FILE).read_bytes())["w"], torch.ones(4))


def test_empty_slices_store_nothing(tmp_path):
    writer = ShardWriter(tmp_path, group=GROUP, file=FILE)
    writer.add(TensorSlice("w", (4, 0), (0, 3)), (4, 3), torch.zeros(0, 3))
    record = writer.finish_shard()
    assert record.pieces == ()
    assert record.num_bytes == record.header_bytes == (tmp_path / FILE).stat().st_size
    assert load((tmp_path / FILE).read_bytes()) == {}


@pytest.mark.parametrize("kind", ["memory", "s3"])
def test_a_shard_larger_than_one_put_goes_in_parts(request, monkeypatch, kind, tmp_path):
    url = request.getfixturevalue("s3_url") if kind == "s3" else f"memory://{tmp_path.name}"
    monkeypatch.setattr(shard_writer, "PUT_BYTES", 2**20)
    monkeypatch.setattr(shard_writer, "PART_BYTES", 5 * 2**20)
    tensors = {"w": torch.randn(3, 2**20)}
    record = write_one(url, tensors, cut("w", (3, 2**20), 0, (1,)))
    data = read_file(f"{url}/{FILE}")
    assert len(data) == record.num_bytes
    assert torch.equal(load(data)["w"], tensors["w"])


def test_a_part_that_fails_leaves_no_object(s3_url, monkeypatch):
    monkeypatch.setattr(shard_writer, "PUT_BYTES", 2**20)
    monkeypatch.setattr(shard_writer, "PART_BYTES", 5 * 2**20)
    write = ShardWriter._write_pieces
    fails = [True]

    def fail_in_the_end(self, placed, sink):
        pieces = write(self, placed, sink)
        if fails:
            raise OSError(errno.EIO, fails.pop())
        return pieces

    monkeypatch.setattr(ShardWriter, "_write_pieces", fail_in_the_end)
    writer = ShardWriter(s3_url, group=GROUP, file=FILE)
    weights = torch.randn(2, 2**20)
    writer.add(whole("w", (2, 2**20)), (2, 2**20), weights)
    with pytest.raises(OSError):
        writer.finish_shard()
    assert list_names(s3_url) == []
    filesystem, _ = open_filesystem(s3_url)
    bucket, prefix = s3_url.removeprefix("s3://").split("/", 1)
    uploads = filesystem.list_multipart_uploads(bucket)  # they are stored, and paid for
    assert not [upload["Key"] for upload in uploads if upload["Key"].startswith(prefix)]
    writer.finish_shard()
    assert torch.equal(load(read_file(f"{s3_url}/{FILE}"))["w"], weights)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace", "posix_fallocate"])
def test_a_failed_write_is_removed_and_may_be_done_again(tmp_path, monkeypatch, call):
    tensors = small_tensors()
    (tmp_path / "old").write_bytes(b"old")
    write_one(str(tmp_path), small_tensors(1), small_cells(tensors))
    before = (tmp_path / FILE).read_bytes()
    original, failures = getattr(os, call), [OSError(errno.EIO, "the disk fell over")]

    def fail_once(*args, **kwargs):
        if failures:
            raise failures.pop()
        return original(*args, **kwargs)

    writer = ShardWriter(tmp_path, group=GROUP, file=FILE)
    for cell in small_cells(tensors):
        writer.add(cell, tuple(tensors[cell.name].shape), take(tensors, cell))
    monkeypatch.setattr(whole_file.os, call, fail_once)
    with pytest.raises(OSError, match="fell over"):
        writer.finish_shard()
    assert sorted(os.listdir(tmp_path)) == [FILE, "old"]
    assert (tmp_path / FILE).read_bytes() == before
    record = writer.finish_shard()
    assert sorted(os.listdir(tmp_path)) == [FILE, "old"]
    assert torch.equal(load((tmp_path / FILE).read_bytes())["rows"], tensors["rows"])
    assert record.num_bytes == (tmp_path / FILE).stat().st_size


LIMITED = """
import resource, sys
import torch
from storage.errors import describe_error
from storage.shard_writer import ShardWriter
from storage.slices import whole
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
for folder in sys.argv[1:]:
    writer = ShardWriter(folder, group="g", file="b.safetensors")
    writer.add(whole("w", (2**20,)), (2**20,), torch.zeros(2**20))
    try:
        writer.finish_shard()
    except OSError as error:
        print(describe_error(error))
"""


def test_a_limit_is_told_and_the_folder_is_as_before(tmp_path):
    """On a disk with a device it is met when room is reserved, on tmpfs when the file is written."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        for folder in (tmp_path / "set", Path(shm) / "set"):
            write_one(str(folder), small_tensors(), small_cells(small_tensors()))
        before = (tmp_path / "set" / FILE).read_bytes()
        run = [sys.executable, "-c", LIMITED, tmp_path / "set", f"{shm}/set"]
        result = subprocess.run(run, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
        for folder in (tmp_path / "set", Path(shm) / "set"):
            assert f"no room for {folder}/b.safetensors: it needs 4194" in result.stdout, result
            assert os.listdir(folder) == [FILE]
            assert (folder / FILE).read_bytes() == before
        assert "(file too large, " in result.stdout


def mount_tmpfs(path: Path) -> bool:
    path.mkdir()
    return subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True).returncode == 0


@pytest.mark.parametrize("check", [True, False], ids=["found before", "found while writing"])
def test_a_full_disk(tmp_path, monkeypatch, check):
    place = tmp_path / "small"
    message = r"no room for .*b.safetensors: it needs 2097\d\d\d bytes \(no space left on device, \d+ are free\); make"
    if not mount_tmpfs(place):
        pytest.skip("only root may mount a small disk")
    try:
        write_one(str(place / "set"), small_tensors(), small_cells(small_tensors()))
        before = (place / "set" / FILE).read_bytes()
        if not check:
            monkeypatch.setattr(whole_file.WholeFile, "_reserve", lambda self: None)
        writer = ShardWriter(place / "set", group=GROUP, file="b.safetensors")
        writer.add(whole("w", (2**19,)), (2**19,), torch.ones(2**19))
        with pytest.raises(
            OSError,
            match=message,
        ) as caught:
            writer.finish_shard()
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(place / "set") == [FILE]
        assert (place / "set" / FILE).read_bytes() == before
    finally:
        subprocess.run(["umount", place], check=True)


def test_room_is_reserved_before_anything_is_written(tmp_path, monkeypatch):
    if os.major(tmp_path.stat().st_dev) == 0:
        pytest.skip("this file system has no device of its own, where room is not reserved")
    sizes = []
    write = whole_file.WholeFile.write

    def watch(self, block):
        sizes.append((os.fstat(self._fd).st_blocks * 512, self.num_bytes))
        write(self, block)

    monkeypatch.setattr(whole_file.WholeFile, "write", watch)
    write_one(str(tmp_path), {"w": torch.ones(2**20)}, [whole("w", (2**20,))])
    assert all(reserved >= num_bytes for reserved, num_bytes in sizes)


def test_memory_stays_bounded(tmp_path):
    """A strided tensor far larger than a block is written without becoming resident once more."""
    base = torch.zeros(2**13, 2**12)  # 128 MiB
    base.fill_(1.0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    now = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    write_one(str(tmp_path), {"w": base.t()}, cut("w", (2**12, 2**13), 1, (100, 3000)))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    assert int(peak.split()[1]) * 1024 < now + 24 * 2**20
