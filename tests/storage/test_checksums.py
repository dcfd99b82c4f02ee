"""Checksums name bytes and their place; anybody can compute them with xxhash alone."""

import itertools
import struct

import pytest
import torch
import xxhash

from storage.checksums import PieceHash, first_element, piece_seed
from storage.slices import TensorSlice, whole
from tests.storage.staged_sets import cut

SHAPE = (6, 5)


def checksum(part: TensorSlice, shape: tuple[int, ...], data: bytes) -> str:
    digest = PieceHash(part, shape)
    digest.update(data)
    return digest.hexdigest()


def test_the_example_of_the_format_description():
    part = TensorSlice("model.norm.weight", (2,), (2,))
    data = struct.pack("<2f", 1.0, -2.0)
    assert data.hex() == "0000803f000000c0"
    assert first_element(part, (4,)) == 2
    assert f"{piece_seed('model.norm.weight', 2):016x}" == "211b67e91e1fe289"
    assert checksum(part, (4,), data) == "3c5670054e679622"
    assert xxhash.xxh3_64_hexdigest(data, seed=xxhash.xxh3_64_intdigest(b"model.norm.weight@2")) == "3c5670054e679622"


@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 4, 5)])
def test_first_element_is_the_row_major_index(shape):
    index = torch.arange(torch.Size(shape).numel()).view(shape)
    for starts in itertools.product(*map(range, shape)):
        part = TensorSlice("w", starts, (1,) * len(shape))
        assert first_element(part, shape) == index[starts]


def test_the_first_element_of_a_scalar_is_0():
    assert first_element(whole("s", ()), ()) == 0


def test_blocks_make_the_same_number_as_the_whole():
    data = bytes(range(256)) * 4000
    digest = PieceHash(whole("w", (1000,)), (1000,))
    for start in range(0, len(data), 333_333):
        digest.update(memoryview(data)[start : start + 333_333])
    assert digest.hexdigest() == checksum(whole("w", (1000,)), (1000,), data)


def test_another_place_or_name_is_another_number():
    data = bytes(40)
    parts = [
        *cut("w", SHAPE, 0, (2, 4)),
        *cut("exp_avg/w", SHAPE, 0, (2, 4)),
        *cut("w@", SHAPE, 1, (2, 4))[1:],
    ]
    assert len({checksum(part, SHAPE, data) for part in parts}) == len(parts)
