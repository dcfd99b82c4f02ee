"""Batching: nothing lost, sizes and sums in bounds, functions of seed, order and lengths only."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nereus.ppo.batching import order_of_minibatches, pack_micro_batches, prompt_indices, share_out

lengths_lists = st.lists(st.integers(0, 500), min_size=1, max_size=40)


def flat(lists):
    return [item for one in lists for item in one]


@given(st.integers(1, 60), st.data())
def test_minibatches_hold_every_sample_once_in_even_sizes(num_samples, data):
    num = data.draw(st.integers(1, num_samples))
    minibatches = order_of_minibatches(3, 1, 0, num_samples, num)
    sizes = [len(one) for one in minibatches]
    assert sorted(flat(minibatches)) == list(range(num_samples))
    assert len(sizes) == num and max(sizes) - min(sizes) <= 1


def test_minibatches_depend_on_seed_step_and_epoch():
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    orders = {tuple(flat(order_of_minibatches(*key, 32, 2))) for key in keys}
    assert len(orders) == 4
    assert order_of_minibatches(0, 0, 0, 32, 2) == order_of_minibatches(0, 0, 0, 32, 2)
    assert flat(order_of_minibatches(0, 0, 0, 32, 2)) == flat(order_of_minibatches(0, 0, 0, 32, 8))


def test_more_minibatches_than_samples_are_refused():
    with pytest.raises(ValueError, match="take 1 to 3"):
        order_of_minibatches(0, 0, 0, 3, 4)


@given(lengths_lists, st.data())
def test_shares_hold_every_sample_once_and_are_balanced(lengths, data):
    num = data.draw(st.integers(1, len(lengths)))
    shares = share_out(lengths, num)
    assert sorted(flat(shares)) == list(range(len(lengths)))
    assert len(shares) == num and all(shares) and all(share == sorted(share) for share in shares)
    sums = [sum(lengths[i] for i in share) for share in shares]
    assert max(sums) <= sum(lengths) / num + max(lengths)


def test_shares_balance_work_not_counts():
    assert share_out([10, 10, 10, 10, 10, 100], 2) == [[5], [0, 1, 2, 3, 4]]
    assert share_out([5, 5, 5], 2) == [[0, 2], [1]]


def test_more_replicas_than_samples_are_refused():
    with pytest.raises(ValueError, match="dp is 3 for 2 samples"):
        share_out([1, 1], 3)


@given(lengths_lists, st.integers(1, 12), st.integers(1, 8))
def test_micro_batches_are_as_few_as_allowed(lengths, most, at_least):
    batches = pack_micro_batches(lengths, most, at_least)
    assert sorted(flat(batches)) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= most for batch in batches)
    assert len(batches) == max(-(-len(lengths) // most), min(at_least, len(lengths)))
    sums = [sum(lengths[i] for i in batch) for batch in batches]
    if most >= len(lengths):
        assert max(sums) <= sum(lengths) / len(batches) + max(lengths)


def test_micro_batches_of_nothing_are_none():
    assert pack_micro_batches([], 4, 2) == []


def test_prompts_wrap_and_every_epoch_holds_each_once():
    slots = prompt_indices(0, 5, 0, 20, 1)
    epochs = [slots[start : start + 5] for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(5)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


@given(st.integers(0, 50), st.integers(0, 30), st.integers(1, 4), st.integers(1, 7))
def test_prompts_depend_on_the_sample_id_only(first, num, samples_per_prompt, num_prompts):
    whole = prompt_indices(9, num_prompts, 0, first + num, samples_per_prompt)
    assert prompt_indices(9, num_prompts, first, num, samples_per_prompt) == whole[first:]
    assert all(whole[i] == whole[i - i % samples_per_prompt] for i in range(len(whole)))
