"""One rank against transformers on every family: logits, gradients, greedy tokens; recomputation; dtypes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nereus.layout import Layout, slices_of
from nereus.model import linear
from nereus.model.batch import PackedBatch
from nereus.model.decoder import DecoderShard
from nereus.model.group import Alone
from nereus.model.heads import token_logprobs
from nereus.model.kv_cache import KvCache
from tests.model.decoder_cases import SPECS, gradients, hf_model, make_shard, random_ids, relative_error

LENGTHS = (7, 13, 13, 5, 1)


def test_batch_positions():
    batch = PackedBatch.of((3, 2, 2))
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert batch.num_tokens == 7


@pytest.mark.parametrize("family", SPECS)
def test_logits_and_gradients_match_transformers(family):
    spec = SPECS[family]
    model = hf_model(spec)
    shard = make_shard(spec, model.state_dict())
    ids = random_ids(spec, sum(LENGTHS))
    logits = shard.logits(shard(ids, PackedBatch.of(LENGTHS)))
    upstream = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))

    expected = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)

    (logits * upstream).sum().backward()
    (expected * upstream).sum().backward()
    by_name = {name: p.grad for name, p in model.named_parameters()}
    for part, grad in gradients(shard).items():
        assert relative_error(grad, by_name[part.name]) < 1e-4, part.name


@pytest.mark.parametrize("family", SPECS)
def test_greedy_tokens_match_transformers(family):
    spec = SPECS[family]
    model = hf_model(spec, seed=3)
    shard = make_shard(spec, model.state_dict())
    prompts = [random_ids(spec, n, seed=n) for n in (4, 9, 6)]
    expected = [
        model.generate(
            p[None], attention_mask=torch.ones_like(p[None]), max_new_tokens=32, do_sample=False, eos_token_id=None
        )[0]
        for p in prompts
    ]
    for whole, prompt in zip(expected, prompts, strict=True):
        greedy = shard.logits(shard(whole, PackedBatch.of((len(whole),)))).argmax(-1)
        assert greedy[len(prompt) - 1 : -1].tolist() == whole[len(prompt) :].tolist()
    assert greedy_by_cache(shard, prompts, 32) == [e[len(p) :].tolist() for e, p in zip(expected, prompts, strict=True)]


def greedy_by_cache(shard: DecoderShard, prompts: list[torch.Tensor], num_new: int) -> list[list[int]]:
    """Prefill into slots in reverse, then decode all slots at once."""
    dtype = next(shard.parameters()).dtype
    cache = KvCache(
        shard.spec, shard.layout, shard.rank, num_slots=len(prompts) + 1, max_tokens=64, dtype=dtype, device="cpu"
    )
    slots = list(reversed(range(len(prompts))))
    batch = PackedBatch.of([len(p) for p in prompts])
    shard.prepare_decode()
    with torch.inference_mode():
        hidden = shard(torch.cat(prompts), batch, cache=cache, slots=slots)
        last = torch.tensor(batch.lengths).cumsum(0) - 1
        tokens = shard.logits(hidden[last]).argmax(-1).flip(0)
        positions = torch.tensor(batch.lengths).flip(0)
        new = [tokens]
        for _ in range(num_new - 1):
            tokens = shard.logits(shard.decode(tokens, positions, cache)).argmax(-1)
            positions = positions + 1
            new.append(tokens)
    return torch.stack(new).t().flip(0).tolist()


@pytest.mark.parametrize("family", SPECS)
def test_packed_weights_decode_like_plain_ones(family, monkeypatch):
    made = []

    class Counted(linear._PackedProduct):
        def __init__(self, weight, bias):
            made.append(weight.shape)
            super().__init__(weight, bias)

    monkeypatch.setattr(linear, "_LEAST_PACKED_ELEMENTS", 1)  # the weights here are small
    monkeypatch.setattr(linear, "_PackedProduct", Counted)
    spec = SPECS[family]
    prompts = [random_ids(spec, n, seed=n) for n in (4, 9, 6)]
    shard = make_shard(spec, hf_model(spec, seed=3).state_dict())
    packed = greedy_by_cache(shard, prompts, 12)
    assert bool(made) == linear.packing_pays(torch.ones(1))
    shard.drop_prepared()
    shard.prepare_decode = lambda: None
    assert greedy_by_cache(shard, prompts, 12) == packed


def test_neighbours_do_not_change_a_sequence():
    spec = SPECS["mistral"]
    shard = make_shard(spec, hf_model(spec, dtype=torch.float64).state_dict(), dtype=torch.float64)
    ids = random_ids(spec, sum(LENGTHS))
    with torch.no_grad():
        packed = shard(ids, PackedBatch.of(LENGTHS)).split(LENGTHS)
        for part, hidden in zip(ids.split(LENGTHS), packed, strict=True):
            alone = shard(part, PackedBatch.of((len(part),)))
            torch.testing.assert_close(hidden, alone, atol=1e-13, rtol=0)


@pytest.mark.parametrize("family", ["qwen3", "smollm2"])
def test_recomputation_gives_bitwise_equal_gradients(family):
    spec = SPECS[family]
    shard = make_shard(spec, hf_model(spec).state_dict())
    ids, batch = random_ids(spec, sum(LENGTHS)), PackedBatch.of(LENGTHS)
    kept = []
    for recompute in (False, True):
        shard.zero_grad()
        shard.logits(shard(ids, batch, recompute=recompute)).square().sum().backward()
        kept.append({part: grad.clone() for part, grad in gradients(shard).items()})
    assert all(torch.equal(kept[0][part], kept[1][part]) for part in kept[0])


@pytest.mark.parametrize("family", ["qwen2", "smollm2"])
def test_a_second_backward_adds_to_the_gradients(family):
    spec = SPECS[family]
    shard = make_shard(spec, hf_model(spec, dtype=torch.float64).state_dict(), dtype=torch.float64)
    ids, targets = random_ids(spec, 20) % 7, random_ids(spec, 20, seed=2)  # tokens repeat

    def backward():
        hidden = shard(ids, PackedBatch.of((12, 8)))
        token_logprobs(shard, hidden, targets, temperature=1.0)[0].sum().backward()

    backward()
    buffers = {name: p.grad for name, p in shard.named_parameters()}
    once = {name: grad.clone() for name, grad in buffers.items()}
    backward()
    for name, parameter in shard.named_parameters():
        assert parameter.grad is buffers[name]
        torch.testing.assert_close(parameter.grad, 2 * once[name], atol=1e-12, rtol=1e-12)


def test_bfloat16_gradients_of_all_matrices_reach_main_grad():
    spec = SPECS["smollm2"]
    weights = hf_model(spec).state_dict()
    exact, rough = make_shard(spec, weights), make_shard(spec, weights, dtype=torch.bfloat16)
    for parameter in rough.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.zeros(parameter.shape)
    ids = random_ids(spec, 20)
    for shard in (exact, rough):
        hidden = shard(ids, PackedBatch.of((12, 8)))
        token_logprobs(shard, hidden, ids, temperature=1.0)[0].sum().backward()
    for name, parameter in rough.named_parameters():
        expected = exact.get_parameter(name).grad
        result = parameter.main_grad if parameter.dim() == 2 else parameter.grad.float()
        assert parameter.dim() != 2 or parameter.grad is None
        assert (result - expected).norm() < 0.1 * expected.norm(), name


def test_same_input_twice_is_bitwise_equal():
    spec = SPECS["qwen2"]
    shard = make_shard(spec, hf_model(spec).state_dict())
    ids, batch = random_ids(spec, sum(LENGTHS)), PackedBatch.of(LENGTHS)
    first, second = shard(ids, batch), shard(ids, batch)
    assert torch.equal(first, second)


class _DtypeWalk(TorchDispatchMode):
    """Collects the floating dtypes of everything that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, torch.Tensor) and item.is_floating_point():
                self.seen.add(item.dtype)
        return out


@pytest.mark.parametrize("family", SPECS)
def test_float64_is_never_cast_down(family):
    spec = SPECS[family]
    shard = make_shard(spec, hf_model(spec, dtype=torch.float64).state_dict(), dtype=torch.float64)
    ids = random_ids(spec, 12)
    with _DtypeWalk() as walk:
        hidden = shard(ids, PackedBatch.of((7, 5)), recompute=True)
        logprobs, entropy = token_logprobs(shard, hidden, ids, temperature=0.7)
        logprobs.sum().backward()
        greedy_by_cache(shard, [ids[:4], ids[4:]], 3)
    assert logprobs.dtype == entropy.dtype == torch.float64
    assert walk.seen == {torch.float64}


def test_bfloat16_is_close_to_float32():
    spec = SPECS["qwen3"]
    weights = hf_model(spec).state_dict()
    exact, rough = make_shard(spec, weights), make_shard(spec, weights, dtype=torch.bfloat16)
    ids, batch = random_ids(spec, sum(LENGTHS)), PackedBatch.of(LENGTHS)
    with torch.no_grad():
        expected, hidden = exact(ids, batch), rough(ids, batch)
    assert hidden.dtype == torch.bfloat16
    assert (hidden - expected).square().mean().sqrt() < 0.05 * expected.square().mean().sqrt()


@pytest.mark.parametrize(("head", "num_labels"), [("value", 1), ("score", 3)])
def test_value_and_score_heads(head, num_labels):
    spec = replace(SPECS["smollm2"], head=head, num_labels=num_labels)
    weights = dict(hf_model(SPECS["smollm2"]).state_dict())
    weights["value_head.weight" if head == "value" else "score.weight"] = torch.randn(num_labels, spec.hidden)
    shard = make_shard(spec, weights)
    hidden = shard(random_ids(spec, 9), PackedBatch.of((4, 5)))
    expected = hidden @ weights["value_head.weight" if head == "value" else "score.weight"].t()
    result = shard.values(hidden)[:, None] if head == "value" else shard.scores(hidden)
    torch.testing.assert_close(result, expected)
    assert shard.tied_embedding is None


LAYOUTS = [Layout(tp, pp) for tp in (1, 2, 3) for pp in (1, 2, 3)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "smollm2"])
def test_views_are_the_slices_of_the_layout(family, layout):
    spec = SPECS[family]
    for rank in range(layout.size):
        group = Alone()
        group.rank, group.size = layout.tp_rank(rank), layout.tp
        shard = DecoderShard(spec, layout, rank, group=group, dtype=torch.float32, device="meta")
        views = shard.views()
        assert tuple(view.slice for view in views) == slices_of(spec, layout, rank)
        covered = {name: torch.zeros(p.shape) for name, p in shard.named_parameters()}
        for view in views:
            part = view.of(covered[view.parameter])
            assert tuple(part.shape) == view.slice.sizes
            part += 1
        assert all(bool((count == 1).all()) for count in covered.values())
