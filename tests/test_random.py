"""Known answers of the generator, and that every number depends on its key and position only."""

import numpy as np
import pytest
import xxhash

from nereus.random import normal_slice, permutation, raw_words, uniforms

MASK = 2**64 - 1


def philox4x64(counter, key):
    """One block of Philox4x64-10, as in Salmon et al. 2011, in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [right >> 64 ^ c[1] ^ k[0], right & MASK, left >> 64 ^ c[3] ^ k[1], left & MASK]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_the_plain_philox_has_random123s_known_answer():
    pi = [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89]
    key = [0x452821E638D01377, 0xBE5466CF34E90C6C]
    assert philox4x64(pi, key) == [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6]


def test_words_are_philox_of_the_hashed_key():
    digest = xxhash.xxh3_128_intdigest(b'["purpose", 3, 4]')
    key = [digest >> 64, digest & MASK]
    # numpy counts up before it makes a block, so the first block has counter 1.
    expected = [word for block in (1, 2, 3) for word in philox4x64([block, 0, 0, 0], key)]
    assert raw_words(("purpose", 3, 4), 0, 12).tolist() == expected
    assert raw_words(("purpose", 3, 4), 5, 6).tolist() == expected[5:11]


def test_uniforms_have_known_answers():
    assert uniforms(0, 0, 0, 3).tolist() == KNOWN_UNIFORMS
    assert uniforms(7, 3, 41, 2, start=100).tolist() == KNOWN_LATER_UNIFORMS


def test_any_position_can_be_had_alone():
    whole = uniforms(1, 2, 3, 50)
    for start in (0, 1, 3, 4, 17, 49):
        assert uniforms(1, 2, 3, 1, start=start)[0] == whole[start]
    assert uniforms(1, 2, 3, 20).tolist() == whole[:20].tolist()


def test_uniforms_are_uniform_and_differ_by_every_part_of_the_key():
    streams = [uniforms(*key, 4000) for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    for stream in streams:
        assert stream.min() >= 0 and stream.max() < 1
        counts = np.histogram(stream, bins=20, range=(0, 1))[0]
        assert ((counts - 200) ** 2 / 200).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert np.abs(np.corrcoef(streams) - np.eye(4)).max() < 0.06
    assert (uniforms(0, 0, 0, 1000) * 2**53 % 1 == 0).all()


@pytest.mark.parametrize("num_items", [0, 1, 2, 97])
def test_a_permutation_holds_every_item_once(num_items):
    assert sorted(permutation(("test", 1), num_items).tolist()) == list(range(num_items))


def test_permutations_have_known_answers():
    assert permutation(("prompts", 0, 0), 8).tolist() == KNOWN_PERMUTATION
    assert permutation(("prompts", 0, 1), 8).tolist() != KNOWN_PERMUTATION


def test_normal_rows_are_the_same_however_they_are_cut():
    whole = normal_slice(0, "critic", "value_head.weight", (7, 3, 5), 0, 7, 0.02)
    for start, stop in [(0, 1), (1, 4), (4, 7), (3, 3)]:
        part = normal_slice(0, "critic", "value_head.weight", (7, 3, 5), start, stop, 0.02)
        assert part.dtype == np.float64 and np.array_equal(part, whole[start:stop])


def test_normals_have_known_answers_and_moments():
    known = normal_slice(0, "actor", "lm_head.weight", (1, 3), 0, 1, 1.0)[0]
    assert known.tolist() == pytest.approx(KNOWN_NORMALS, rel=1e-14)
    sample = normal_slice(5, "actor", "w", (200, 100), 0, 200, 2.0)
    assert abs(sample.mean()) < 0.05 and abs(sample.std() - 2.0) < 0.04
    assert abs((sample**4).mean() / sample.var() ** 2 - 3) < 0.2
    assert not np.array_equal(sample, normal_slice(5, "critic", "w", (200, 100), 0, 200, 2.0))


KNOWN_UNIFORMS = [0.9377499908176409, 0.9101323636506042, 0.7345088806500113]
KNOWN_LATER_UNIFORMS = [0.9870837590665595, 0.12977469062207636]
KNOWN_PERMUTATION = [0, 1, 3, 6, 4, 5, 2, 7]
KNOWN_NORMALS = [-1.0659958203407438, 0.5077547434640565, 0.5558763118885414]
