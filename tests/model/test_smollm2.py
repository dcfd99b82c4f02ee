"""The real pretrained model against `transformers`: logits, gradients, greedy tokens, export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nereus.layout import Layout
from nereus.model.batch import PackedBatch
from nereus.model.checkpoint import read_spec
from nereus.model.decoder import DecoderShard
from nereus.model.export import begin_export, finish_export, write_slices
from nereus.model.group import Alone
from nereus.model.heads import token_logprobs
from nereus.model.kv_cache import KvCache
from nereus.model.tokens import read_eos_ids
from nereus.model.weights import CheckpointSource, load_shard
from nereus.runtime.generation import Request, Sampling, generate

SMOLLM2 = Path("models/smollm2-135m-instruct")
PROMPTS = ("What is 17 plus 25?", "Write a haiku about a slow network link.")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="make smollm2 fetches the model"),
]


@pytest.fixture(scope="module")
def shard() -> DecoderShard:
    spec = read_spec(str(SMOLLM2))
    shard = DecoderShard(spec, Layout(), 0, group=Alone(), dtype=torch.float32, device="cpu")
    load_shard(shard, CheckpointSource(str(SMOLLM2), spec))
    return shard


@pytest.fixture(scope="module")
def peer():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    chats = [[{"role": "user", "content": text}] for text in PROMPTS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def packed_logits(shard: DecoderShard, prompts: list[list[int]]) -> torch.Tensor:
    batch = PackedBatch.of([len(p) for p in prompts])
    return shard.logits(shard(torch.tensor([token for p in prompts for token in p]), batch))


def test_logits(shard: DecoderShard, peer, prompts: list[list[int]]) -> None:
    with torch.no_grad():
        theirs = torch.cat([peer(torch.tensor([p])).logits[0] for p in prompts])
        assert (packed_logits(shard, prompts) - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_gradients(shard: DecoderShard, prompts: list[list[int]]) -> None:
    """Against transformers in float64, since its own float32 gradients are up to 1.5e-4 off these.

    Its embedding is made with a padding index, whose row gets no gradient from the lookup: that row is left out.
    """
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float64)
    batch = PackedBatch.of([len(p) for p in prompts])
    hidden = shard(torch.tensor([token for p in prompts for token in p]), batch)
    predicting = torch.cat(
        [torch.arange(len(p) - 1) + start for p, start in zip(prompts, (0, len(prompts[0])), strict=True)]
    )
    targets = torch.tensor([token for p in prompts for token in p[1:]])
    token_logprobs(shard, hidden[predicting], targets, temperature=1.0)[0].sum().backward()
    for prompt in prompts:
        logprobs = peer(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        logprobs.gather(1, torch.tensor(prompt[1:])[:, None]).sum().backward()
    theirs = {name: p.grad for name, p in peer.named_parameters()}
    theirs["model.embed_tokens.weight"][peer.config.pad_token_id] = 0
    grads = {name: p.grad for name, p in shard.named_parameters()}
    grads["embed.weight"][peer.config.pad_token_id] = 0
    for view in shard.views():
        ours, other = view.of(grads[view.parameter]).double(), theirs[view.slice.name]
        assert (ours - other).norm() <= 1e-4 * other.norm(), (view.slice.name, (ours - other).norm() / other.norm())
    shard.zero_grad(set_to_none=True)


def test_greedy_tokens(shard: DecoderShard, peer, prompts: list[list[int]]) -> None:
    cache = KvCache(shard.spec, Layout(), 0, num_slots=2, max_tokens=96, dtype=torch.float32, device="cpu")
    shard.prepare_decode()
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    eos = read_eos_ids(str(SMOLLM2))
    ours = generate(shard, requests, Sampling(0, 0, 0.0, 1.0, 32, eos), cache=cache, replica=Alone(), tp=Alone())
    shard.drop_prepared()
    for prompt, response in zip(prompts, ours, strict=True):
        theirs = peer.generate(torch.tensor([prompt]), max_new_tokens=32, do_sample=False)
        assert response.tokens == theirs[0, len(prompt) :].tolist()


def test_export_gives_the_same_logits(shard: DecoderShard, peer, prompts: list[list[int]], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = str(tmp_path / "out")
    where = str(SMOLLM2)
    plan = begin_export(out, shard.spec, dtype=torch.float32, config_from=where, tokenizer_from=where)
    parameters = dict(shard.named_parameters())
    written = write_slices(plan, ((v.slice, v.of(parameters[v.parameter]).detach()) for v in shard.views()))
    finish_export(plan, written_bytes=written)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = torch.tensor([prompts[0]])
        assert torch.equal(again(ids).logits, peer(ids).logits)
