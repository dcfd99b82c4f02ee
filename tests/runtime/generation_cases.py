"""A small model, requests for it, and the plain loop that generation is held against."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from nereus.layout import Layout
from nereus.model.batch import PackedBatch
from nereus.model.decoder import DecoderShard
from nereus.model.group import Alone, Group
from nereus.model.spec import ModelSpec, tensors
from nereus.ppo.sampling import sample_tokens
from nereus.random import uniforms
from nereus.runtime.generation import Request, Response, Sampling

SPEC = ModelSpec(
    family="llama",
    vocab=50,
    hidden=24,
    layers=3,
    heads=6,
    kv_heads=3,
    head_dim=4,
    intermediate=20,
    initializer_range=0.4,
)
SAMPLING = Sampling(seed=3, step=1, temperature=0.8, top_p=1.0, max_response_tokens=12, eos_ids=(7, 11, 13))


def make_weights(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Draw a model that is far from uniform, so that a wrong row or position changes its tokens."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(info.shape, generator=generator, dtype=torch.float64) * spec.initializer_range
        + (1.0 if len(info.shape) == 1 else 0.0)
        for name, info in tensors(spec).items()
    }


def make_shard(spec: ModelSpec, weights: dict[str, Tensor], layout: Layout, rank: int, group: Group) -> DecoderShard:
    """Return a rank of the model in float64, ready to decode."""
    shard = DecoderShard(spec, layout, rank, group=group, dtype=torch.float64, device="cpu")
    parameters = dict(shard.named_parameters())
    with torch.no_grad():
        for view in shard.views():
            part = view.slice
            index = tuple(slice(a, b) for a, b in zip(part.starts, part.stops, strict=True))
            view.of(parameters[view.parameter]).copy_(weights[part.name][index])
    shard.prepare_decode()
    return shard


def make_requests(num: int, seed: int = 0, longest: int = 9) -> list[Request]:
    """Return random prompts of 1 to `longest` tokens."""
    rng = random.Random(seed)
    return [
        Request(100 + i, tuple(rng.randrange(SPEC.vocab) for _ in range(rng.randint(1, longest)))) for i in range(num)
    ]


def run_plain(shard: DecoderShard, requests: list[Request], sampling: Sampling) -> list[Response]:
    """Draw each response alone, the whole sequence computed anew for every token."""
    responses = []
    for request in requests:
        noise = uniforms(sampling.seed, sampling.step, request.sample_id, sampling.max_response_tokens)
        tokens: list[int] = []
        logprobs: list[float] = []
        while len(tokens) < sampling.max_response_tokens and not (tokens and tokens[-1] in sampling.eos_ids):
            ids = torch.tensor([*request.prompt, *tokens])
            with torch.no_grad():
                logits = shard.logits(shard(ids, PackedBatch.of([len(ids)]))[-1:])
            token, logprob = sample_tokens(
                logits,
                noise[len(tokens) : len(tokens) + 1],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                group=Alone(),
                vocab_start=0,
            )
            tokens.append(int(token))
            logprobs.append(float(logprob))
        responses.append(Response(request.sample_id, tokens, logprobs, tokens[-1] in sampling.eos_ids))
    return responses
