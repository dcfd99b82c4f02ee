"""Token log-probs and entropy against log_softmax, in one chunk and in many."""

from __future__ import annotations

import weakref

import pytest
import torch

from nereus import limits
from nereus.model import heads
from nereus.model.heads import token_logprobs
from nereus.model.linear import product
from tests.model.decoder_cases import SPECS, hf_model, make_shard, random_ids


def case(dtype=torch.float64):
    spec = SPECS["qwen2"]
    shard = make_shard(spec, hf_model(spec).state_dict(), dtype=dtype)
    torch.manual_seed(0)
    hidden = torch.randn(11, spec.hidden, dtype=dtype, requires_grad=True)
    return shard, hidden, random_ids(spec, 11, seed=4)


@pytest.mark.parametrize("chunk_bytes", [2**28, 3 * 101 * 8])
@pytest.mark.parametrize("block_bytes", [2**22, 2 * 101 * 8])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_entropy_and_gradients(monkeypatch, chunk_bytes, block_bytes, temperature):
    monkeypatch.setattr(limits, "LOGITS_BUFFER_BYTES", chunk_bytes)
    monkeypatch.setattr(heads, "_BLOCK_BYTES", block_bytes)
    shard, hidden, targets = case()
    weight = shard.head_weight
    logprobs, entropy = token_logprobs(shard, hidden, targets, temperature=temperature)
    expected = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, chosen, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1), atol=1e-12, rtol=0)
    assert not entropy.requires_grad
    upstream = torch.randn_like(logprobs)
    mine = torch.autograd.grad(logprobs, (hidden, weight), upstream)
    for grad, reference in zip(mine, torch.autograd.grad(chosen, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(grad, reference, atol=1e-11, rtol=0)


def test_bfloat16_logprobs_are_float32():
    shard, hidden, targets = case(torch.bfloat16)
    logprobs, entropy = token_logprobs(shard, hidden, targets, temperature=1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = torch.log_softmax(shard.logits(hidden).float(), -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == torch.bfloat16


def test_no_rows():
    shard, hidden, targets = case()
    logprobs, entropy = token_logprobs(shard, hidden[:0], targets[:0], temperature=1.0)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()


def test_memory_is_bounded():
    assert limits.logits_chunk_rows(10_000, 49_152, 4) == 1365
    most = limits.LOGITS_BUFFER_BYTES + 3 * limits.LOGITS_BLOCK_BYTES
    assert limits.logits_bytes(10_000, 49_152, 4) <= most
    assert limits.logits_chunk_rows(7, 49_152, 4) == 7


def test_one_chunk_of_logits_is_alive_at_a_time(monkeypatch):
    shard, hidden, targets = case()
    alive = []

    def watched(x, weight):
        assert not any(reference() is not None for reference in alive), "the last chunk is still there"
        made = product(x, weight)
        if weight.shape[0] == shard.head_weight.shape[0]:  # logits, not the gradient of the hidden states
            alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(limits, "LOGITS_BUFFER_BYTES", 3 * 101 * 8)
    monkeypatch.setattr(heads, "product", watched)
    with torch.no_grad():
        token_logprobs(shard, hidden, targets, temperature=1.0)
    assert len(alive) == 4
