"""The sampler against the plain rule, over split vocabularies, and against the distribution it draws from."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.model.group import Alone
from nereus.ppo.sampling import sample_tokens
from nereus.random import uniforms
from tests.runtime.thread_ranks import run_group

ALONE = {"group": Alone(), "vocab_start": 0}


def sample_split(logits, u, cuts, **kwargs):
    """Sample with the vocabulary cut at `cuts`, one thread a rank, and return every rank's result."""
    bounds = [0, *cuts, logits.shape[1]]

    def sample(group):
        first, stop = bounds[group.rank : group.rank + 2]
        return sample_tokens(logits[:, first:stop], u, group=group, vocab_start=first, **kwargs)

    return run_group(len(cuts) + 1, sample)


def plain_softmax(row, temperature):
    peak = max(row)
    weights = [math.exp((logit - peak) / temperature) for logit in row]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def plain_nucleus(probs, top_p):
    """The smallest set by (-p, id) with sum >= top_p."""
    kept, total = [], 0.0
    for token in sorted(range(len(probs)), key=lambda i: (-probs[i], i)):
        kept.append(token)
        total += probs[token]
        if total >= top_p:
            break
    return sorted(kept)


def plain_sample(row, u, temperature, top_p):
    probs = plain_softmax(row, temperature)
    kept = plain_nucleus(probs, top_p) if top_p < 1 else range(len(probs))
    target, cdf = u * math.fsum(probs[i] for i in kept), 0.0
    for token in kept:
        cdf += probs[token]
        if cdf > target:
            return token, math.log(probs[token])
    raise AssertionError("u is below 1")


def make_logits(num_rows, num_ids, seed=0, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(num_rows, num_ids, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("num_ids", [1, 7, 256, 257, 1000])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.5, 0.9), (1.0, 0.3)])
def test_it_follows_the_plain_rule(num_ids, temperature, top_p):
    logits, u = make_logits(9, num_ids), uniforms(0, 0, 0, 9)
    tokens, logprobs = sample_tokens(logits, u, temperature=temperature, top_p=top_p, **ALONE)
    assert tokens.dtype == torch.int64 and logprobs.dtype == torch.float64
    for row in range(9):
        token, logprob = plain_sample(logits[row].tolist(), u[row], temperature, top_p)
        assert tokens[row].item() == token
        assert logprobs[row].item() == pytest.approx(logprob, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_split_vocabulary_draws_the_same(data):
    num_ids = data.draw(st.integers(3, 700))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_ids - 1), min_size=1, max_size=2)))
    temperature = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    top_p = data.draw(st.sampled_from([1.0, 0.8]))
    seed = data.draw(st.integers(0, 1000))
    logits, u = make_logits(5, num_ids, seed), uniforms(seed, 0, 0, 5)
    alone = sample_tokens(logits, u, temperature=temperature, top_p=top_p, **ALONE)
    for tokens, logprobs in sample_split(logits, u, cuts, temperature=temperature, top_p=top_p):
        assert torch.equal(tokens, alone[0])
        torch.testing.assert_close(logprobs, alone[1], rtol=0, atol=1e-12)


def test_ranks_agree_bitwise():
    logits, u = make_logits(64, 900), uniforms(0, 1, 0, 64)
    first, *others = sample_split(logits, u, [300, 301], temperature=1.0, top_p=1.0)
    for tokens, logprobs in others:
        assert torch.equal(tokens, first[0]) and torch.equal(logprobs, first[1])


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (2.0, 0.75)])
def test_draws_have_the_right_distribution(temperature, top_p):
    row = [2.0, -1.0, 0.5, 0.5, -torch.inf, 1.0]
    num = 5_000
    logits = torch.tensor([row]).repeat(num, 1)
    tokens, _ = sample_tokens(logits, uniforms(0, 0, 0, num), temperature=temperature, top_p=top_p, **ALONE)
    probs = plain_softmax(row, temperature)
    kept = plain_nucleus(probs, top_p) if top_p < 1 else [i for i in range(6) if probs[i] > 0]
    counts = np.bincount(tokens.numpy(), minlength=6)
    mass = sum(probs[i] for i in kept)
    assert counts.sum() == counts[kept].sum()
    expected = np.array([probs[i] / mass * num for i in kept])
    assert ((counts[kept] - expected) ** 2 / expected).sum() < 18.5  # chi-square, at most 4 degrees, p = 0.001


def test_top_p_breaks_ties_by_the_lower_id():
    logits = torch.zeros(1, 2000, dtype=torch.float64).repeat(50, 1)
    tokens, logprobs = sample_tokens(logits, uniforms(0, 0, 0, 50), temperature=1.0, top_p=0.01, **ALONE)
    assert tokens.max().item() < 20
    assert logprobs.tolist() == pytest.approx([-math.log(2000)] * 50)


def test_a_wide_nucleus_is_found():
    logits, u = make_logits(4, 5000, scale=0.1), np.array([0.0, 0.3, 0.6, 1 - 2.0**-53])
    tokens, _ = sample_tokens(logits, u, temperature=1.0, top_p=0.9, **ALONE)
    for row in range(4):
        assert tokens[row].item() == plain_sample(logits[row].tolist(), u[row], 1.0, 0.9)[0]


def test_greedy_takes_the_first_id_of_the_largest_logit():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, -1.0, 5.0, 5.0]])
    u = np.array([0.99, 0.99])
    tokens, logprobs = sample_tokens(logits, u, temperature=0.0, top_p=1.0, **ALONE)
    assert tokens.tolist() == [1, 0]
    assert logprobs.tolist() == pytest.approx([math.log(plain_softmax(row, 1.0)[1 - i]) for i, row in LOGIT_ROWS])
    for split_tokens, _ in sample_split(logits, u, [1, 3], temperature=0.0, top_p=1.0):
        assert split_tokens.tolist() == [1, 0]


LOGIT_ROWS = [(0, [0.0, 3.0, 1.0, 3.0]), (1, [5.0, -1.0, 5.0, 5.0])]


@pytest.mark.parametrize("cuts", [[], [1], [2, 3]])
def test_an_impossible_token_is_never_drawn_at_the_edges_of_u(cuts):
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    u = np.array([0.0, 1 - 2.0**-53])
    for tokens, _ in sample_split(logits, u, cuts, temperature=1.0, top_p=1.0):
        assert tokens.tolist() == [1, 3]


def test_logits_far_from_zero_and_far_apart_are_safe():
    logits = torch.tensor([[-3e4, -3e4 + 1, 9e4, -9e4]], dtype=torch.float32)
    for tokens, logprobs in sample_split(logits, np.array([0.5]), [2], temperature=0.1, top_p=1.0):
        assert tokens.tolist() == [2] and logprobs.tolist() == [0.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.5)])
def test_broken_logits_are_refused(bad, temperature, top_p):
    logits = make_logits(3, 10)
    logits[1, 4] = bad
    with pytest.raises(FloatingPointError, match=r"rows \[1\]"):
        sample_tokens(logits, np.full(3, 0.5), temperature=temperature, top_p=top_p, **ALONE)


def test_low_precision_logits_are_taken_as_they_are():
    logits, u = make_logits(6, 600, dtype=torch.bfloat16), uniforms(0, 0, 0, 6)
    expected = sample_tokens(logits.double(), u, temperature=1.0, top_p=1.0, **ALONE)
    for left, right in zip(sample_tokens(logits, u, temperature=1.0, top_p=1.0, **ALONE), expected, strict=True):
        assert torch.equal(left, right)


def test_no_rows_give_no_tokens():
    for temperature, top_p in [(1.0, 1.0), (0.0, 1.0), (1.0, 0.5)]:
        tokens, logprobs = sample_tokens(torch.zeros(0, 5), np.zeros(0), temperature=temperature, top_p=top_p, **ALONE)
        assert tokens.shape == logprobs.shape == (0,)
