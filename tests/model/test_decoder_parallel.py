"""Tensor-parallel ranks as threads and pipeline stages by hand give what one rank gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nereus.layout import Layout
from nereus.model.batch import PackedBatch
from nereus.model.heads import token_logprobs
from nereus.model.kv_cache import KvCache
from tests.model.decoder_cases import SPECS, cut, gradients, hf_model, make_shard, random_ids
from tests.runtime.thread_ranks import run_group

LENGTHS = (7, 3, 3)
F64 = torch.float64


def whole_result(spec, weights, ids, targets):
    shard = make_shard(spec, weights, dtype=F64)
    logprobs, entropy = token_logprobs(shard, shard(ids, PackedBatch.of(LENGTHS)), targets, temperature=0.7)
    logprobs.square().sum().backward()
    return logprobs.detach(), entropy, {part.name: grad for part, grad in gradients(shard).items()}


def run_stages(spec, weights, layout, group, ids, targets, recompute):
    """Chain the stages of one tp rank, as a pipeline would, and return (logprobs, entropy, gradients by slice)."""
    shards = [
        make_shard(spec, weights, layout, stage * layout.tp + group.rank, group=group, dtype=F64)
        for stage in range(layout.pp)
    ]
    inputs, outputs, x = [], [], ids
    for shard in shards:
        x = x if shard.is_first else x.detach().requires_grad_()
        inputs.append(x)
        x = shard(x, PackedBatch.of(LENGTHS), recompute=recompute)
        outputs.append(x)
    logprobs, entropy = token_logprobs(shards[-1], x, targets, temperature=0.7)
    logprobs.square().sum().backward()
    for stage in reversed(range(layout.pp - 1)):
        outputs[stage].backward(inputs[stage + 1].grad)
    if layout.pp > 1 and spec.ties_head:
        first, last = shards[0].tied_embedding, shards[-1].tied_embedding
        total = first.grad + last.grad
        first.grad, last.grad = total, total.clone()
    for shard in shards:
        for parameter in shard.tp_summed:
            group.all_reduce(parameter.grad)
    return logprobs.detach(), entropy, [gradients(shard) for shard in shards]


@pytest.mark.parametrize("layout", [Layout(2, 1), Layout(3, 1), Layout(1, 3), Layout(2, 2), Layout(3, 2)], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm2"])
def test_every_layout_gives_the_result_of_one_rank(family, layout):
    spec = SPECS[family]
    weights = hf_model(spec, dtype=F64).state_dict()
    ids, targets = random_ids(spec, sum(LENGTHS)), random_ids(spec, sum(LENGTHS), seed=5)
    expected_logprobs, expected_entropy, expected = whole_result(spec, weights, ids, targets)
    ranks = run_group(layout.tp, lambda g: run_stages(spec, weights, layout, g, ids, targets, family == "qwen3"))
    for logprobs, entropy, stages in ranks:
        torch.testing.assert_close(logprobs, expected_logprobs, atol=1e-11, rtol=0)
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-11, rtol=0)
        for grads in stages:
            for part, grad in grads.items():
                reference = expected[part.name]
                scale = float(reference.abs().max())
                torch.testing.assert_close(grad, reference[cut(part)], atol=1e-11 * scale, rtol=0, msg=str(part))


@pytest.mark.parametrize("tp", [2, 3])
def test_tensor_parallel_decode(tp):
    spec = SPECS["smollm2"]
    weights = hf_model(spec, dtype=F64).state_dict()
    ids, new = random_ids(spec, 9), random_ids(spec, 2, seed=8)

    def decode(group):
        shard = make_shard(spec, weights, Layout(tp, 1), group.rank, group=group, dtype=F64)
        shard.prepare_decode()
        cache = KvCache(spec, Layout(tp, 1), group.rank, num_slots=2, max_tokens=16, dtype=F64, device="cpu")
        with torch.inference_mode():
            shard(ids, PackedBatch.of((4, 5)), cache=cache, slots=(0, 1))
            return shard.logits(shard.decode(new, torch.tensor([4, 5]), cache))

    logits = torch.cat(run_group(tp, decode), dim=1)
    shard = make_shard(spec, weights, dtype=F64)
    with torch.no_grad():
        for row, part in enumerate(ids.split((4, 5))):
            full = torch.cat((part, new[row : row + 1]))
            expected = shard.logits(shard(full, PackedBatch.of((len(full),))))[-1]
            torch.testing.assert_close(logits[row], expected, atol=1e-11, rtol=0)


def test_pipeline_decode():
    spec = SPECS["mistral"]
    weights = hf_model(spec, dtype=F64).state_dict()
    ids, new = random_ids(spec, 11), random_ids(spec, 1, seed=8)
    layout = Layout(1, 2)
    shards = [make_shard(spec, weights, layout, rank, dtype=F64) for rank in range(2)]
    caches = [KvCache(spec, layout, r, num_slots=1, max_tokens=16, dtype=F64, device="cpu") for r in range(2)]
    with torch.inference_mode():
        x, y = ids, new
        for shard, cache in zip(shards, caches, strict=True):
            x = shard(x, PackedBatch.of((11,)), cache=cache, slots=(0,))
            y = shard.decode(y, torch.tensor([11]), cache)
        whole = make_shard(spec, weights, dtype=F64)
        expected = whole(torch.cat((ids, new)), PackedBatch.of((12,)))[-1:]
    torch.testing.assert_close(y, expected, atol=1e-11, rtol=0)


def test_value_head_gradient_is_whole_on_every_tp_rank():
    spec = replace(SPECS["qwen2"], head="value")
    weights = dict(hf_model(SPECS["qwen2"], dtype=F64).state_dict())
    weights["value_head.weight"] = torch.randn(1, spec.hidden, dtype=F64)
    ids = random_ids(spec, sum(LENGTHS))

    def backward(group):
        layout = Layout(group.size, 1)
        shard = make_shard(spec, weights, layout, group.rank, group=group, dtype=F64)
        shard.values(shard(ids, PackedBatch.of(LENGTHS))).square().sum().backward()
        return gradients(shard)

    (expected,) = run_group(1, backward)
    by_name = {part.name: grad for part, grad in expected.items()}
    for grads in run_group(3, backward):
        for part, grad in grads.items():
            torch.testing.assert_close(grad, by_name[part.name][cut(part)], atol=1e-10, rtol=1e-9, msg=str(part))
