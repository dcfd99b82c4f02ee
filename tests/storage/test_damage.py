"""Damage of any file of a set is found by verification and while loading, whatever it is and wherever it lies."""

import os
import shutil

import pytest
import torch

from storage.manifest import DamagedState
from storage.safetensors_header import parse_header
from storage.shard_record import ShardRecord
from storage.slices import whole
from storage.small_files import read_file, remove_file, replace_file
from storage.state import read_state, verify_state
from tests.storage.staged_sets import GROUP, cut, read_slices, read_whole, write_shards, write_small_set


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    write_small_set(str(folder / "set"))
    return folder / "set"


@pytest.fixture
def folder(intact, tmp_path):
    return shutil.copytree(intact, tmp_path / "set")


def assert_found(url, name):
    """Verification and loading both name the damaged file."""
    problems = verify_state(url)
    assert problems, "verification found nothing"
    assert all("\n" not in problem for problem in problems)
    assert any(name in problem for problem in problems), problems
    with pytest.raises(
        DamagedState, match=rf"(manifest\.json|{GROUP}-[01]\.safetensors) (is|has) "
    ):  # the first it met
        read_whole(url, read_state(url))


def flips(num_bytes: int) -> range:
    """Return positions: all of a small file, every so many of a larger one."""
    return range(0, num_bytes, max(1, num_bytes // 1500))


@pytest.mark.parametrize("name", ["manifest.json", f"{GROUP}-0.safetensors", f"{GROUP}-1.safetensors"])
def test_every_flip_of_a_byte(folder, name):
    path = folder / name
    data = path.read_bytes()
    with path.open("r+b") as file:
        for position in flips(len(data)):
            changed = data[position] ^ (1 << position % 8)
            os.pwrite(file.fileno(), bytes([changed]), position)
            assert_found(str(folder), name)
            os.pwrite(file.fileno(), data[position : position + 1], position)
    assert verify_state(folder) == []


@pytest.mark.parametrize("position", [0, 7, 8, 200, -100, -1])
@pytest.mark.parametrize("name", ["manifest.json", f"{GROUP}-0.safetensors"])
def test_flips_on_every_store(store_url, name, position):
    write_small_set(store_url)
    data = bytearray(read_file(f"{store_url}/{name}"))
    data[position] ^= 0x10
    replace_file(f"{store_url}/{name}", bytes(data))
    assert_found(store_url, name)


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1])
@pytest.mark.parametrize("name", ["manifest.json", f"{GROUP}-0.safetensors"])
def test_truncation(store_url, name, length):
    write_small_set(store_url)
    replace_file(f"{store_url}/{name}", read_file(f"{store_url}/{name}")[:length])
    assert_found(store_url, name)


@pytest.mark.parametrize("name", ["manifest.json", f"{GROUP}-0.safetensors"])
def test_bytes_too_many(store_url, name):
    write_small_set(store_url)
    replace_file(f"{store_url}/{name}", read_file(f"{store_url}/{name}") + b"\n")
    assert_found(store_url, name)


@pytest.mark.parametrize("name", ["manifest.json", f"{GROUP}-0.safetensors"])
def test_a_missing_file(store_url, name):
    write_small_set(store_url)
    remove_file(f"{store_url}/{name}")
    assert_found(store_url, name)


def test_files_swapped(store_url):
    _, manifest = write_small_set(store_url)
    one, other = (f"{store_url}/{shard.file}" for shard in manifest.shards)
    first, second = read_file(one), read_file(other)
    replace_file(one, second)
    replace_file(other, first)
    assert_found(store_url, manifest.shards[0].file)


def equal_headers(first: ShardRecord, second: ShardRecord) -> bool:
    return (first.num_bytes, first.header_checksum) == (second.num_bytes, second.header_checksum)


def test_a_shard_of_another_step_with_the_same_header(store_url):
    _, manifest = write_small_set(f"{store_url}/1", seed=0)
    _, other = write_small_set(f"{store_url}/2", seed=1)
    name = manifest.shards[0].file
    assert equal_headers(manifest.shards[0], other.shards[0])
    replace_file(f"{store_url}/1/{name}", read_file(f"{store_url}/2/{name}"))
    assert_found(f"{store_url}/1", name)


def test_pieces_swapped_inside_a_file(tmp_path):
    """Equal sizes and, here, a file that its own header describes perfectly: only the seeds tell."""
    tensors = {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}
    tensors["b"] += 1
    (record,) = write_shards(str(tmp_path), tensors, cut("a", (4, 4), 0, (2,)) + cut("b", (4, 4), None), num_shards=1)
    data = bytearray((tmp_path / record.file).read_bytes())
    a, b = data[-128:-64], data[-64:]
    data[-128:] = b + a
    (tmp_path / record.file).write_bytes(data)
    parse_header(bytes(data), len(data), "x")
    with pytest.raises(DamagedState, match="tensor 'a' at"):
        read_slices(str(tmp_path), [record], [(whole("a", (4, 4)), torch.zeros(4, 4))])


def test_zeros_in_the_wrong_place_are_found():
    """Moments of fresh tensors are all zeros, so a piece's place has to be in its checksum."""
    from storage.checksums import PieceHash

    first, second = cut("exp_avg/w", (4, 4), 0, (2,))
    digests = {PieceHash(part, (4, 4)) for part in (first, second)}
    for digest in digests:
        digest.update(bytes(32))
    assert len({digest.hexdigest() for digest in digests}) == 2


def test_a_sparse_hole_where_data_was(folder):
    """What a crash of a file system leaves: the right size, zeros inside."""
    path = folder / f"{GROUP}-0.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(size - 64)
        file.truncate(size)
    assert_found(str(folder), path.name)


def test_every_problem_is_named(folder):
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4] + b"\xaa\xbb\xcc\xdd")
    problems = verify_state(folder)
    assert len(problems) == 2
    assert all("doesn't match its checksum" in problem for problem in problems)


def test_reading_what_the_disk_cannot_give(folder, monkeypatch):
    preadv = os.preadv

    def fail(fd, buffers, offset):
        if offset > 300:
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    manifest = read_state(folder)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(DamagedState, match="can't be read at or behind byte"):
        read_slices(str(folder), manifest.shards, [(whole("rows", (12, 10)), torch.zeros(12, 10))])
