"""A reader fills tensors with what it wants of a set: only those bytes, all of them, each of them verified."""

import gc
import threading
import weakref

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import state_reader
from storage.byte_reader import LocalBytes
from storage.checksums import PieceHash
from storage.manifest import DamagedState, Manifest, Piece, ShardRecord, TensorMeta
from storage.safetensors_header import DTYPES, build_header
from storage.slices import TensorSlice, whole
from storage.state import commit_state, read_state
from storage.state_reader import StateReader
from storage.tensor_bytes import bytes_of
from tests.storage.staged_sets import (
    GROUP,
    cut,
    read_slices,
    read_whole,
    small_cells,
    small_tensors,
    take,
    write_shards,
    write_small_set,
)


def test_a_set_comes_back_from_every_store(store_url):
    tensors, manifest = write_small_set(store_url)
    outs = read_whole(store_url, manifest)
    assert all(torch.equal(outs[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("buffer_bytes", [8, 100, 1000, 2**28])
@pytest.mark.parametrize("threads", [1, 4])
def test_with_any_buffer(store_url, threads, buffer_bytes):
    tensors, manifest = write_small_set(store_url)
    part = TensorSlice("columns", (0, 1), (8, 6))
    narrow, wide = torch.zeros(8, 6), torch.zeros(12, 10, dtype=torch.float64)
    wanted = [(part, narrow), (whole("rows", (12, 10)), wide)]
    read_slices(store_url, manifest.shards, wanted, threads=threads, buffer_bytes=buffer_bytes)
    assert torch.equal(narrow, take(tensors, part))
    assert torch.equal(wide, tensors["rows"].double())


def test_only_the_bytes_of_wanted_pieces_are_read(tmp_path, monkeypatch):
    _, manifest = write_small_set(str(tmp_path))
    reads = []
    original = LocalBytes.read_into

    def watch(self, start, *buffers):
        reads.append((start, sum(map(len, buffers))))
        original(self, start, *buffers)

    monkeypatch.setattr(LocalBytes, "read_into", watch)
    out = torch.zeros(3, 10)
    assert read_slices(str(tmp_path), manifest.shards, [(TensorSlice("rows", (3, 0), (3, 10)), out)]) == 3 * 10 * 4
    assert sum(length for start, length in reads if start) == 3 * 10 * 4
    reads.clear()
    read_slices(str(tmp_path), manifest.shards[:1], [(TensorSlice("rows", (0, 0), (3, 10)), out)])
    assert len([start for start, _ in reads if not start]) == 1  # the other shard wasn't even opened


def test_an_object_store_is_asked_at_once_and_for_nothing_else(tmp_path, monkeypatch):
    url = f"memory://{tmp_path.name}"
    tensors = {"w": torch.randn(12, 10)}
    (record,) = write_shards(url, tensors, cut("w", (12, 10), 0, (2, 4, 8)), num_shards=1)
    asked = []
    cat_ranges = MemoryFileSystem.cat_ranges

    def watch(self, paths, starts, ends, **options):
        asked.append([stop - start for start, stop in zip(starts, ends, strict=True)])
        return cat_ranges(self, paths, starts, ends, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_ranges", watch)
    first, rest = torch.zeros(2, 10), torch.zeros(8, 10, dtype=torch.float64)
    wanted = [(TensorSlice("w", (0, 0), (2, 10)), first), (TensorSlice("w", (4, 0), (8, 10)), rest)]
    read_slices(url, [record], wanted, threads=1)
    assert asked == [[record.header_bytes], [2 * 40, 8 * 40]]  # the last two pieces lie side by side
    assert torch.equal(first, tensors["w"][:2])
    assert torch.equal(rest, tensors["w"][4:].double())


def test_pieces_go_straight_into_tensors_that_hold_them_in_order(tmp_path, monkeypatch):
    tensors, manifest = write_small_set(str(tmp_path))
    rows, strided = torch.zeros(12, 10), torch.zeros(10, 12).t()
    own = range(rows.data_ptr(), rows.data_ptr() + rows.nbytes)
    direct = 0
    original = LocalBytes.read_into

    def watch(self, start, *buffers):
        nonlocal direct
        direct += sum(len(b) for b in buffers if torch.frombuffer(b, dtype=torch.uint8).data_ptr() in own)
        original(self, start, *buffers)

    monkeypatch.setattr(LocalBytes, "read_into", watch)
    part = whole("rows", (12, 10))
    read_slices(str(tmp_path), manifest.shards, [(part, rows)])
    assert direct == rows.nbytes
    read_slices(str(tmp_path), manifest.shards, [(part, strided)])
    assert torch.equal(rows, tensors["rows"])
    assert torch.equal(strided, tensors["rows"])


def test_nothing_beside_a_view_is_touched(tmp_path):
    tensors, manifest = write_small_set(str(tmp_path))
    target = torch.zeros(10, 14)
    part = TensorSlice("columns", (0, 2), (8, 7))
    read_slices(str(tmp_path), manifest.shards, [(part, target[1:9, 3:10])])
    expected = torch.zeros(10, 14)
    expected[1:9, 3:10] = take(tensors, part)
    assert torch.equal(target, expected)


def test_two_targets_may_want_the_same_piece(store_url):
    tensors, manifest = write_small_set(store_url)
    one, other, third = torch.zeros(6, 10), torch.zeros(4, 10), torch.zeros(6, 10)
    wanted = [(TensorSlice("rows", (0, 0), (6, 10)), one), (TensorSlice("rows", (4, 0), (4, 10)), other)]
    read_slices(store_url, manifest.shards, [*wanted, (TensorSlice("rows", (0, 0), (6, 10)), third)])
    assert torch.equal(one, tensors["rows"][:6])
    assert torch.equal(third, one)
    assert torch.equal(other, tensors["rows"][4:8])


def test_a_file_of_another_writer_may_have_any_order(tmp_path):
    """Half a word of two bytes lies before words of eight, in one block of the buffer."""
    tensors = {"h": torch.ones(3).bfloat16(), "d": torch.randn(4, dtype=torch.float64)}
    text, header = build_header({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}, {})
    data, pieces = text, []
    for name, tensor in tensors.items():
        part, entry = whole(name, tuple(tensor.shape)), header.entries[name]
        digest = PieceHash(part, part.sizes)
        digest.update(bytes_of(tensor))
        data += bytes(bytes_of(tensor))
        pieces.append(Piece(part, name, entry.start, entry.stop, digest.hexdigest()))
    (tmp_path / "a.safetensors").write_bytes(data)
    metas = {"h": TensorMeta("BF16", (3,)), "d": TensorMeta("F64", (4,))}
    record = ShardRecord(GROUP, "a.safetensors", len(data), header.checksum, metas, tuple(pieces))
    outs = {"h": torch.zeros(3, dtype=torch.float64), "d": torch.zeros(4)}  # other dtypes, so all goes through it
    read_slices(str(tmp_path), [record], [(whole(name, tuple(out.shape)), out) for name, out in outs.items()])
    assert all(torch.equal(out, tensors[name].to(out.dtype)) for name, out in outs.items())


def test_records_may_come_in_any_order_twice_and_of_other_groups(tmp_path):
    tensors, manifest = write_small_set(str(tmp_path))
    others = write_shards(str(tmp_path), small_tensors(5), small_cells(tensors), group="critic.training")
    out = torch.zeros(12, 10)
    wanted = [(whole("rows", (12, 10)), out)]
    fed = [others[0], *reversed(manifest.shards), others[1], *manifest.shards]
    assert read_slices(str(tmp_path), fed, wanted) == out.nbytes
    assert torch.equal(out, tensors["rows"])


def test_shards_are_read_while_others_are_still_written(tmp_path):
    tensors = small_tensors()
    first, second = write_shards(str(tmp_path), tensors, small_cells(tensors))
    (tmp_path / second.file).rename(tmp_path / "later")
    out = torch.zeros(12, 10)
    with StateReader(tmp_path, GROUP, [(whole("rows", (12, 10)), out)]) as reader:
        reader.feed(first)
        for job in reader._jobs:
            job.result()
        assert 0 < reader.bytes_read < out.nbytes
        (tmp_path / "later").rename(tmp_path / second.file)
        reader.feed(second)
        reader.finish()
    assert torch.equal(out, tensors["rows"])


def test_a_gap_is_told(tmp_path):
    _, manifest = write_small_set(str(tmp_path))
    with pytest.raises(DamagedState, match=r"gap: of tensor 'rows' of actor\.training, 80 elements"):
        read_slices(str(tmp_path), manifest.shards[:1], [(whole("rows", (12, 10)), torch.zeros(12, 10))])
    with pytest.raises(DamagedState, match="gap: of tensor 'other'"):
        read_slices(str(tmp_path), manifest.shards, [(whole("other", (2,)), torch.zeros(2))])
    with pytest.raises(DamagedState, match="gap"):
        read_slices(str(tmp_path), [], [(whole("bias", (7,)), torch.zeros(7))])


def test_tensors_of_another_model_are_told(tmp_path):
    _, manifest = write_small_set(str(tmp_path))
    with pytest.raises(DamagedState, match=r"shape \(12, 10\), not that of the model"):
        read_slices(str(tmp_path), manifest.shards, [(whole("rows", (120,)), torch.zeros(120))])
    with pytest.raises(DamagedState, match="gap"):
        read_slices(str(tmp_path), manifest.shards, [(whole("rows", (12, 11)), torch.zeros(12, 11))])


def test_empty_slices_want_nothing(tmp_path):
    _, manifest = write_small_set(str(tmp_path))
    wanted = [(whole("nothing", (0, 4)), torch.zeros(0, 4)), (TensorSlice("rows", (4, 0), (0, 10)), torch.zeros(0, 10))]
    assert read_slices(str(tmp_path), manifest.shards, wanted) == 0


def test_a_damaged_shard_stops_the_others(tmp_path):
    _, manifest = write_small_set(str(tmp_path))
    (tmp_path / manifest.shards[0].file).unlink()
    out = torch.zeros(12, 10)
    with StateReader(tmp_path, GROUP, [(whole("rows", (12, 10)), out)], threads=1) as reader:
        reader.feed(manifest.shards[0])
        reader._jobs[0].result()
        reader.feed(manifest.shards[1])
        assert len(reader._jobs) == 1
        for _ in range(2):
            with pytest.raises(DamagedState, match="missing"):
                reader.finish()


def test_a_reader_that_failed_goes_at_once_and_its_tensors_with_it(tmp_path):
    _, manifest = write_small_set(str(tmp_path))
    (tmp_path / manifest.shards[0].file).unlink()
    gc.disable()  # nothing waits for the collector: it may be long in coming
    try:
        with (
            pytest.raises(DamagedState, match="missing"),
            StateReader(tmp_path, GROUP, [(whole("rows", (12, 10)), torch.zeros(12, 10))]) as reader,
        ):
            held = weakref.ref(reader)
            reader.feed(manifest.shards[0])
            reader.finish()
        del reader
        assert held() is None
    finally:
        gc.enable()


def test_a_closed_reader_touches_nothing_any_more(tmp_path, monkeypatch):
    _, manifest = write_small_set(str(tmp_path))
    begun, go_on = threading.Event(), threading.Event()
    original = state_reader.ShardReader

    def slow(*args):
        begun.set()
        go_on.wait(10)
        return original(*args)

    monkeypatch.setattr(state_reader, "ShardReader", slow)
    out = torch.zeros(12, 10)
    reader = StateReader(tmp_path, GROUP, [(whole("rows", (12, 10)), out)], threads=1)
    for record in manifest.shards:
        reader.feed(record)
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    reader.close()
    held = out.clone()
    assert not any(thread.name.startswith("state-reader") for thread in threading.enumerate())
    assert torch.equal(out, held)
    assert not out[3:5].any()  # of the second shard, which was never begun


def test_files_are_closed(tmp_path, monkeypatch):
    _, manifest = write_small_set(str(tmp_path))
    open_files = []
    original, close = LocalBytes.__init__, LocalBytes.close

    def opening(self, *args, **kwargs):
        original(self, *args, **kwargs)
        open_files.append(self)

    def closing(self):
        open_files.remove(self)
        close(self)

    monkeypatch.setattr(LocalBytes, "__init__", opening)
    monkeypatch.setattr(LocalBytes, "close", closing)
    read_whole(str(tmp_path), manifest)
    assert open_files == []
    path = tmp_path / manifest.shards[0].file
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(DamagedState):
        read_whole(str(tmp_path), manifest)
    assert open_files == []


SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def cases(draw):
    """Draw some tensors, the cells they are written in, and the slices that are read, made of other cells."""
    tensors, written, wanted, needed = {}, [], [], 0
    for number in range(draw(st.integers(1, 4))):
        name, shape = f"t{number}", draw(SHAPES)
        dtype = DTYPES[draw(st.sampled_from(["F64", "F32", "BF16", "I64", "U8", "F8_E4M3"]))]
        count = torch.Size(shape).numel()
        tensors[name] = (torch.arange(count) % 120).to(dtype).view(shape)
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        bounds = [] if dim is None else draw(st.lists(st.integers(0, shape[dim]), max_size=4))
        cells = cut(name, shape, dim, bounds)
        written += cells
        others = cut(
            name, shape, dim, draw(st.lists(st.sampled_from([0, *bounds]), max_size=2)) if dim is not None else []
        )
        for part in others:  # whole pieces of the written ones
            if draw(st.booleans()):
                wanted.append(part)
                needed += part.num_elements * dtype.itemsize
    return tensors, draw(st.permutations(written)), wanted, needed, draw(st.integers(1, 3))


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(8, 200), st.booleans())
def test_whatever_is_written_with_one_cut_is_read_with_another(tmp_path_factory, case, buffer_bytes, strided):
    tensors, written, wanted, needed, num_shards = case
    url = str(tmp_path_factory.mktemp("set"))
    records = write_shards(url, tensors, written, num_shards=num_shards)
    commit_state(url, Manifest("r", 0, {}, {}, tuple(records)))
    outs = []
    for part in wanted:
        dtype = tensors[part.name].dtype
        room = torch.zeros(tuple(2 * n for n in part.sizes) if strided else part.sizes, dtype=dtype)
        outs.append(room[tuple(slice(0, None, 2) for _ in part.sizes)] if strided else room)
    manifest = read_state(url)
    assert {name: meta.shape for name, meta in manifest.tensors_of(GROUP).items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    num_bytes = read_slices(url, manifest.shards, list(zip(wanted, outs, strict=True)), buffer_bytes=buffer_bytes)
    for part, out in zip(wanted, outs, strict=True):
        assert torch.equal(out.double(), take(tensors, part).double()), part
    assert num_bytes == needed


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slice_is_read_right_even_where_it_cuts_pieces(tmp_path_factory, data):
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensors = {"w": torch.randn(shape)}
    cells = cut("w", shape, dim, data.draw(st.lists(st.integers(0, shape[dim]), max_size=3)))
    url = str(tmp_path_factory.mktemp("set"))
    records = write_shards(url, tensors, cells)
    starts = tuple(data.draw(st.integers(0, n)) for n in shape)
    sizes = tuple(data.draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True))
    out = torch.zeros(sizes)
    read_slices(url, records, [(TensorSlice("w", starts, sizes), out)], buffer_bytes=32)
    assert torch.equal(out, take(tensors, TensorSlice("w", starts, sizes)))
