"""Slots of the KV cache: shapes by rank, writes, moves and parts."""

from __future__ import annotations

import pytest
import torch

from nereus.layout import Layout
from nereus.model.kv_cache import KvCache
from tests.model.decoder_cases import SPECS


def make_cache(layout: Layout | None = None, rank: int = 0) -> KvCache:
    return KvCache(
        SPECS["smollm2"], layout or Layout(), rank, num_slots=4, max_tokens=6, dtype=torch.float32, device="cpu"
    )


@pytest.mark.parametrize(("rank", "kv_heads", "num_layers"), [(0, 2, 2), (1, 1, 2), (2, 2, 1), (3, 1, 1)])
def test_a_rank_holds_its_heads_and_layers(rank, kv_heads, num_layers):
    cache = make_cache(Layout(2, 2), rank)
    assert len(cache.keys) == len(cache.values) == num_layers
    assert cache.keys[0].shape == (4, kv_heads, 6, 8)


def test_write_puts_tokens_where_slots_and_positions_say():
    cache = make_cache()
    key_value = torch.randn(3, 6, 8)
    key, value = key_value.split(3, dim=1)
    rows = cache.rows(torch.tensor([2, 0, 2]), torch.tensor([5, 1, 0]))
    cache.write(1, rows, key_value)
    assert torch.equal(cache.keys[1][2, :, 5], key[0])
    assert torch.equal(cache.keys[1][0, :, 1], key[1])
    assert torch.equal(cache.values[1][2, :, 0], value[2])
    assert int((cache.keys[1] != 0).sum()) == key.numel()
    assert not cache.keys[0].any()


def test_move_slot_copies_the_first_positions_of_all_layers():
    cache = make_cache()
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    cache.move_slot(3, 1, 4)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new[1, :, :4], old[3, :, :4])
        assert torch.equal(new[1, :, 4:], old[1, :, 4:])
        assert torch.equal(new[[0, 2, 3]], old[[0, 2, 3]])


def test_a_part_shares_the_memory():
    cache = make_cache()
    part = cache.part(2, 2)
    assert part.num_slots == 2
    part.write(0, part.rows(torch.tensor([1]), torch.tensor([3])), torch.ones(1, 6, 8))
    assert bool((cache.keys[0][3, :, 3] == 1).all())
    assert int(cache.keys[0].count_nonzero()) == 3 * 8
