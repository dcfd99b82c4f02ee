"""A manifest comes back as it was written, or not at all."""

import json
import math
from dataclasses import replace

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.manifest import DamagedState, Manifest, TensorMeta, dump_manifest, parse_manifest
from storage.safetensors_header import DTYPES
from storage.shard_record import ITEM_BYTES
from tests.storage.staged_sets import GROUP, small_cells, small_tensors, write_shards

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Manifest:
    tensors = small_tensors()
    records = write_shards(str(tmp_path_factory.mktemp("set")), tensors, small_cells(tensors))
    return Manifest("run-é", 7, {"kl_coef": 0.1 + 0.2}, {"tp": 2}, tuple(records))


def test_it_comes_back(manifest):
    data = dump_manifest(manifest)
    parsed = parse_manifest(data, "m")
    assert parsed == manifest
    assert parsed.checksum == json.loads(data)["checksum"]
    assert parsed.groups == (GROUP,)
    assert parsed.tensors_of(GROUP)["rows"] == TensorMeta("F32", (12, 10))
    assert parsed.tensors_of(GROUP)["nothing"] == TensorMeta("F32", (0, 4))
    assert parsed.num_bytes == sum(shard.num_bytes for shard in manifest.shards)
    assert parsed.shards_of("critic.training") == ()


def test_the_checksum_is_that_of_the_text_without_it(manifest):
    data = dump_manifest(manifest)
    text, _, end = data.rpartition(b',"checksum":"')
    assert end == xxhash.xxh3_128_hexdigest(text + b"}").encode() + b'"}'


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(), JSON_VALUES, max_size=5))
def test_any_run_state_comes_back_exactly(run_state):
    manifest = Manifest("r", 0, run_state, {}, ())
    assert parse_manifest(dump_manifest(manifest), "m").run_state == run_state


@pytest.mark.parametrize("value", [math.nan, math.inf, {1}, object()])
def test_what_json_does_not_know_is_not_written(value):
    with pytest.raises(ValueError, match="step 4 is no JSON"):
        dump_manifest(Manifest("r", 4, {"x": [value]}, {}, ()))


def test_every_flip_of_a_byte_is_found(manifest):
    data = dump_manifest(manifest)
    for position in range(len(data)):
        for pattern in (1, 0x20, 0x80, 0xFF):
            changed = bytearray(data)
            changed[position] ^= pattern
            with pytest.raises(DamagedState):
                parse_manifest(bytes(changed), "m")


def test_every_cut_and_every_addition_is_found(manifest):
    data = dump_manifest(manifest)
    for changed in (*(data[:length] for length in range(len(data))), data + b" ", data + b"\n", b" " + data, data * 2):
        with pytest.raises(DamagedState):
            parse_manifest(changed, "m")


def test_an_unknown_version_is_refused_by_name(manifest):
    data = dump_manifest(manifest).replace(b'"version":1,', b'"version":12,')
    with pytest.raises(DamagedState, match=r"m has format version 12, .* reads version 1 only"):
        parse_manifest(data, "m")


def test_another_format_is_refused(manifest):
    with pytest.raises(DamagedState, match="m is no nereus-state manifest"):
        parse_manifest(b'{"hello":1}', "m")


def test_the_same_text_for_the_same_manifest(manifest):
    assert dump_manifest(manifest) == dump_manifest(replace(manifest, checksum="of another time"))


def test_sizes_of_dtypes_are_those_of_torch():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
