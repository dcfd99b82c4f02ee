"""Manifests made to do harm, each with a right checksum: refused before anything is read, in little time and memory."""

import json
import tracemalloc

import pytest
import xxhash

from storage import manifest as manifest_module
from storage.byte_reader import LocalBytes
from storage.manifest import MAX_MANIFEST_BYTES, DamagedState, dump_manifest, parse_manifest
from storage.state import read_state, verify_state
from tests.storage.staged_sets import write_small_set

HUGE = 2**63
START = '{"format":"nereus-state","version":1,'


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    _, manifest = write_small_set(str(tmp_path_factory.mktemp("set")))
    tree = json.loads(dump_manifest(manifest))
    del tree["checksum"]
    return tree


def seal(text: str) -> bytes:
    """Return the text of a JSON object with its right checksum added."""
    data = text.encode()
    return data[:-1] + f',"checksum":"{xxhash.xxh3_128_hexdigest(data)}"}}'.encode()


def change(tree, *path_and_value):
    """Return a copy of the tree with one member replaced; a callable value gets the old one."""
    copy = json.loads(json.dumps(tree))
    *path, last, value = path_and_value
    place = copy
    for key in path:
        place = place[key]
    place[last] = value(place[last]) if callable(value) else value
    return copy


def refuse(tree, match=None):
    with pytest.raises(DamagedState, match=match) as caught:
        parse_manifest(seal(json.dumps(tree, separators=(",", ":"))), "m")
    assert len(str(caught.value)) < 1500
    assert "\n" not in str(caught.value)


def test_the_tree_itself_is_fine(tree):
    parse_manifest(seal(json.dumps(tree, separators=(",", ":"))), "m")


FILES = [
    *("../secret.safetensors", "/etc/secret.safetensors", "a/../../b.safetensors", "sub/b.safetensors"),
    *("..\\b.safetensors", "C:\\b.safetensors", "a..b.safetensors", ".hidden.safetensors", "..safetensors"),
    *("b.safetensors\x00", "b.safetensors\n", "b.pt", "b.safetensors.pkl", "", ".", "..", "~b.safetensors"),
    *("file:b.safetensors", "%2e%2e.safetensors", "a" * 300 + ".safetensors", 7, None, ["b.safetensors"], {}),
]


@pytest.mark.parametrize("file", FILES, ids=repr)
def test_paths(tree, file):
    refuse(change(tree, "shards", 0, "file", file), "file name")


@pytest.mark.parametrize("group", ["", "../x", "a b", "a/b", 3, None, "x" * 500, "-x"])
def test_groups(tree, group):
    refuse(change(tree, "shards", 0, "group", group), "group")


@pytest.mark.parametrize("number", [-1, 0, 8, HUGE, 10**30, 1.0, "400", None, True, [400]])
def test_sizes_of_files(tree, number):
    refuse(change(tree, "shards", 0, "num_bytes", number))


PLACE = ("shards", 0, "tensors", "rows", "pieces", 0)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("number", [-1, -(2**62), 0, 4, HUGE, 2**62, 1.5, "8", None, False])
def test_byte_ranges(tree, index, number):
    refuse(change(tree, *PLACE, "bytes", index, number))


@pytest.mark.parametrize("member", ["starts", "sizes"])
@pytest.mark.parametrize("number", [-1, HUGE, 2**62, 13, 1.0, "0", None])
def test_places(tree, member, number):
    refuse(change(tree, *PLACE, member, 0, number))


@pytest.mark.parametrize("member", ["starts", "sizes", "bytes"])
@pytest.mark.parametrize("value", [[], [0], [0, 1, 2], [0] * 100, None, "00", {"0": 0}, [[0], [0]]])
def test_lists_of_numbers(tree, member, value):
    refuse(change(tree, *PLACE, member, value))


@pytest.mark.parametrize("dtype", ["F16", "F64", "BF16", "C64", "float32", "", "F32 ", None, 4, ["F32"]])
def test_dtypes(tree, dtype):
    refuse(change(tree, "shards", 0, "tensors", "rows", "dtype", dtype))


@pytest.mark.parametrize("shape", [[12], [12, 10, 1], [12, 9], [13, 10], [0, 0], [HUGE, 10], [-12, 10], [1] * 50, 12])
def test_shapes(tree, shape):
    refuse(change(tree, "shards", 0, "tensors", "rows", "shape", shape))


@pytest.mark.parametrize("key", ["columns", "rows@1", "rows@00", "rows", "../rows@0", "", 5, None, "x" * 1000])
def test_keys(tree, key):
    refuse(change(tree, *PLACE, "key", key))


@pytest.mark.parametrize("checksum", ["", "0" * 15, "0" * 17, "G" * 16, "A" * 16, 0, None])
def test_checksums(tree, checksum):
    refuse(change(tree, *PLACE, "checksum", checksum))
    refuse(change(tree, "shards", 0, "header_checksum", checksum))


@pytest.mark.parametrize("name", ["", "a@0", "a b", "a\n", "é", "\ud800", "x" * 600])
def test_tensor_names(tree, name):
    refuse(change(tree, "shards", 0, "tensors", lambda old: {**old, name: old["rows"]}), "tensor name")


def test_a_gap_of_rows(tree):
    last = tree["shards"][1]["tensors"]["rows"]["pieces"]
    assert len(last) == 2
    refuse(change(tree, "shards", 1, "tensors", "rows", "pieces", last[:1]), "hole|gap|end at byte")
    refuse(change(tree, "shards", 1, "tensors", {}))
    refuse(change(tree, "shards", tree["shards"][:1]), "gap")


def test_a_gap_that_only_all_shards_together_show(tree):
    for shard in (0, 1):
        tree = change(tree, "shards", shard, "tensors", "rows", "shape", [13, 10])
    refuse(tree, "gap at the end")


@pytest.mark.parametrize(("start", "what"), [(2, "overlap"), (4, "leave a gap"), (0, "overlap")])
def test_pieces_moved_in_the_tensor(tree, start, what):
    """Everything else fits: bytes, keys and sizes."""
    piece = tree["shards"][1]["tensors"]["rows"]["pieces"][0]
    moved = {**piece, "starts": [start, 0], "key": f"rows@{start}"}
    refuse(change(tree, "shards", 1, "tensors", "rows", "pieces", 0, moved), what)


def test_a_header_that_would_fill_memory(tree):
    """Of a file without pieces everything is header; of others, what lies before the first piece."""
    empty = {**tree["shards"][0], "file": "b.safetensors", "num_bytes": 2**40, "tensors": {}}
    refuse(change(tree, "shards", lambda old: [*old, empty]), "header of b.safetensors would have 1099511627776 bytes")
    moved = change(tree, "shards", 0, "num_bytes", lambda old: old + 2**40)
    for tensor in moved["shards"][0]["tensors"].values():
        for piece in tensor["pieces"]:
            piece["bytes"] = [place + 2**40 for place in piece["bytes"]]
    refuse(moved, "header of actor")


def test_a_tensor_of_which_nothing_is_there(tree):
    empty = {"dtype": "F32", "shape": [4], "pieces": []}
    refuse(change(tree, "shards", 0, "tensors", lambda old: {**old, "more": empty}), "gap")


def test_pieces_that_overlap_in_the_file(tree):
    pieces = tree["shards"][0]["tensors"]["rows"]["pieces"]
    twice = [*pieces, {**pieces[0], "starts": [3, 0], "sizes": [2, 10]}]
    refuse(change(tree, "shards", 0, "tensors", "rows", "pieces", twice), "overlap")


def test_pieces_that_overlap_in_the_tensor(tree):
    refuse(change(tree, "shards", 1, "tensors", "rows", "pieces", 0, "starts", [2, 0]), "overlap|key")
    both = change(tree, *PLACE, "starts", [3, 0])
    refuse(both, "overlap|gap|key")


def test_pieces_cut_in_two_dimensions_or_in_different_ones(tree):
    refuse(change(tree, *PLACE, lambda old: {**old, "sizes": [2, 5], "bytes": [old["bytes"][0], old["bytes"][0] + 40]}))
    columns = tree["shards"][0]["tensors"]["columns"]["pieces"][0]
    size = (columns["bytes"][1] - columns["bytes"][0]) // 36
    if size:
        refuse(change(tree, "shards", 0, "tensors", "columns", "pieces", 0, "sizes", [size, 9]))


def test_one_file_twice_and_two_shapes_of_a_tensor(tree):
    refuse(change(tree, "shards", lambda old: [*old, old[0]]), "twice")
    refuse(change(tree, "shards", 1, "tensors", "rows", "shape", [12, 11]))


def test_names_given_twice(tree):
    text = json.dumps(tree, separators=(",", ":"))
    for name, value in (("step", "3"), ("file", '"b.safetensors"'), ("rows", "{}")):
        twice = text.replace(f'"{name}":', f'"{name}":{value},"{name}":', 1)
        with pytest.raises(DamagedState, match="twice"):
            parse_manifest(seal(twice), "m")


@pytest.mark.parametrize("name", ["run_id", "step", "run_state", "plan", "shards"])
@pytest.mark.parametrize("value", [None, -1, 1.5, "", [], [1], {"a": 1}, HUGE, True])
def test_members_of_other_types(tree, name, value):
    if name in ("run_state", "plan") and isinstance(value, dict):
        return
    if name == "shards" and value == []:
        return
    refuse(change(tree, name, value))


def test_members_missing_or_unknown(tree):
    for path in ((), ("shards", 0), ("shards", 0, "tensors", "rows"), PLACE):
        place = tree
        for key in path:
            place = place[key]
        for name in place:
            without = {key: value for key, value in place.items() if key != name}
            refuse(without if not path else change(tree, *path, without))
        more = {**place, "exec": "rm"}
        refuse(more if not path else change(tree, *path, more), "members")


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e", "01", "0x1", "1" * 5000])
def test_numbers_that_are_none(tree, number):
    text = json.dumps(tree, separators=(",", ":")).replace('"kl_coef":0.1', f'"kl_coef":{number}')
    with pytest.raises(DamagedState):
        parse_manifest(seal(text), "m")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"\xef\xbb\xbf", "é".encode("utf-16"), b"\x00" * 10, b"\xc3"])
def test_text_that_is_no_utf8(tree, data):
    text = json.dumps(tree, separators=(",", ":")).encode()[:-1] + b',"x":"' + data + b'"}'
    sealed = text[:-1] + f',"checksum":"{xxhash.xxh3_128_hexdigest(text)}"}}'.encode()
    with pytest.raises(DamagedState):
        parse_manifest(sealed, "m")


HUGE_TEXTS = {
    "nested lists": lambda: f'{START}"run_id":{"[" * 1_000_000}{"]" * 1_000_000}}}',
    "many nested lists": lambda: f'{START}"run_id":{"[" * 10_000_000}{"]" * 10_000_000}}}',
    "nested maps": lambda: START + '"run_id":' + '{"a":' * 1_000_000 + "1" + "}" * 1_000_001,
    "lists": lambda: f'{START}"shards":[{"[]," * 15_000_000}[]]}}',
    "maps": lambda: f'{START}"shards":[{"{}," * 15_000_000}{{}}]}}',
    "numbers": lambda: f'{START}"shards":[{"1," * 25_000_000}1]}}',
    "a long text": lambda: f'{START}"shards":"{"x" * 50_000_000}"}}',
    "a long number": lambda: f'{START}"step":{"9" * 5_000_000}}}',
    "a long name": lambda: f'{START}"{"x" * 50_000_000}":1}}',
    "unclosed": lambda: f'{START}"shards":{"[" * 20_000_000}}}',
}


@pytest.mark.parametrize("kind", HUGE_TEXTS)
def test_huge_and_deeply_nested_texts_cost_little_memory(kind):
    data = seal(HUGE_TEXTS[kind]())
    assert len(data) <= MAX_MANIFEST_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(DamagedState):
            parse_manifest(data, "m")
        assert tracemalloc.get_traced_memory()[1] < 400 * 2**20
    finally:
        tracemalloc.stop()


def test_the_values_that_are_let_through_cost_a_bounded_amount_each(monkeypatch):
    monkeypatch.setattr(manifest_module, "MAX_VALUES", 2**16)
    data = seal(START + '"shards":[' + '{"":0},' * (2**15 - 100) + "{}]}")  # the costliest: a map, two values a piece
    tracemalloc.start()
    try:
        with pytest.raises(DamagedState, match="members of"):
            parse_manifest(data, "m")
        assert 2**20 < tracemalloc.get_traced_memory()[1] < 250 * 2**16  # so 4 million of them: below 1 GB
    finally:
        tracemalloc.stop()


def test_a_file_over_the_limit_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "manifest.json"
    with path.open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    reads = []
    monkeypatch.setattr(LocalBytes, "read_into", lambda self, start, *buffers: reads.append(start))
    with pytest.raises(DamagedState, match=r"above the limit of 67108864 .* is not read"):
        read_state(tmp_path)
    assert reads == []
    assert len(verify_state(tmp_path)) == 1


def test_nothing_outside_the_folder_is_opened(tree, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"x" * 400)
    hostile = change(tree, "shards", 0, "file", "../secret.safetensors")
    (tmp_path / "set" / "manifest.json").write_bytes(seal(json.dumps(hostile, separators=(",", ":"))))
    with pytest.raises(DamagedState, match="file name"):
        read_state(tmp_path / "set")
