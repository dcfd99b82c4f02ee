"""Generation against transformers and against a plain loop that knows neither slots, batches, caches nor ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nereus.layout import Layout
from nereus.model.decoder import DecoderShard
from nereus.model.group import Alone
from nereus.model.kv_cache import KvCache
from nereus.runtime.engine import run_command
from nereus.runtime.generation import Request, Response, Sampling, generate
from nereus.runtime.local import LocalEngine
from tests.runtime.generation_cases import SAMPLING, SPEC, make_requests, make_shard, make_weights, run_plain
from tests.runtime.thread_ranks import ThreadGroup, ThreadRank, run_ranks

EPOCHS = itertools.count(1)  # of the communicators; none is used twice


def run_layout(
    layout: Layout, requests: list[Request], sampling: Sampling, *, num_slots: int, max_tokens: int = 24, **options
) -> list[list[Response]]:
    """Run one replica with a thread for each rank; return every rank's answer."""
    replica_group = ThreadGroup(layout.size)
    tp_groups = [ThreadGroup(layout.tp) for _ in range(layout.pp)]
    weights = make_weights(SPEC)

    def body(rank: int) -> list[Response]:
        tp = ThreadRank(tp_groups[layout.stage(rank)], layout.tp_rank(rank)) if layout.tp > 1 else Alone()
        shard = make_shard(SPEC, weights, layout, rank, tp)
        cache = KvCache(
            SPEC, layout, rank, num_slots=num_slots, max_tokens=max_tokens, dtype=torch.float64, device="cpu"
        )
        replica = ThreadRank(replica_group, rank)
        return generate(shard, requests, sampling, cache=cache, replica=replica, tp=tp, **options)

    return run_ranks(layout.size, body)


def assert_same(got: list[Response], wanted: list[Response]) -> None:
    assert [r.sample_id for r in got] == [r.sample_id for r in wanted]
    assert [r.tokens for r in got] == [r.tokens for r in wanted]
    assert [r.ended for r in got] == [r.ended for r in wanted]
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def plain_shard() -> DecoderShard:
    return make_shard(SPEC, make_weights(SPEC), Layout(), 0, Alone())


@pytest.mark.parametrize(
    "num_slots, num_requests, max_prefill_tokens", [(1, 3, 2048), (4, 15, 2048), (5, 13, 10), (16, 9, 1)]
)
def test_one_rank_draws_what_the_plain_loop_draws(plain_shard, num_slots, num_requests, max_prefill_tokens) -> None:
    requests = make_requests(num_requests, seed=num_slots)
    wanted = run_plain(plain_shard, requests, SAMPLING)
    assert {r.ended for r in wanted} == {True, False} or num_requests < 9
    (got,) = run_layout(Layout(), requests, SAMPLING, num_slots=num_slots, max_prefill_tokens=max_prefill_tokens)
    assert_same(got, wanted)


@pytest.mark.parametrize("tp, pp", [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2), (3, 3)])
@pytest.mark.parametrize("num_slots", [2, 5])
def test_layouts_draw_what_the_plain_loop_draws(plain_shard, tp, pp, num_slots) -> None:
    requests = make_requests(11, seed=tp + pp)
    wanted = run_plain(plain_shard, requests, SAMPLING)
    answers = run_layout(Layout(tp, pp), requests, SAMPLING, num_slots=num_slots)
    for got in answers:
        assert_same(got, wanted)
        assert got == answers[0], "ranks disagree bitwise"


@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_edges(plain_shard, tp, pp) -> None:
    layout = Layout(tp, pp)
    assert run_layout(layout, [], SAMPLING, num_slots=4) == [[]] * layout.size
    one_token = [Request(i, (i,)) for i in range(3)]
    shortest = replace(SAMPLING, max_response_tokens=1)
    as_long_as_the_cache = [Request(5, tuple(range(24))), Request(6, (1, 2))]
    for requests, sampling in [
        (one_token[:1], SAMPLING),
        (one_token, SAMPLING),
        (one_token, shortest),
        (as_long_as_the_cache, shortest),
    ]:
        for got in run_layout(layout, requests, sampling, num_slots=4):
            assert_same(got, run_plain(plain_shard, requests, sampling))


def test_twice_the_same_is_bitwise_equal() -> None:
    requests = make_requests(9)
    for layout in (Layout(), Layout(2, 2)):
        first = run_layout(layout, requests, SAMPLING, num_slots=4)
        assert run_layout(layout, requests, SAMPLING, num_slots=4) == first


def test_top_p_and_temperature_reach_the_draw(plain_shard) -> None:
    requests = make_requests(6)
    sampling = replace(SAMPLING, temperature=1.5, top_p=0.7)
    wanted = run_plain(plain_shard, requests, sampling)
    assert wanted != run_plain(plain_shard, requests, SAMPLING)
    for got in run_layout(Layout(3, 1), requests, sampling, num_slots=3):
        assert_same(got, wanted)


def test_greedy_tokens_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=SPEC.vocab,
        hidden_size=SPEC.hidden,
        num_hidden_layers=SPEC.layers,
        num_attention_heads=SPEC.heads,
        num_key_value_heads=SPEC.kv_heads,
        head_dim=SPEC.head_dim,
        intermediate_size=SPEC.intermediate,
        rms_norm_eps=SPEC.rms_eps,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    model.load_state_dict(make_weights(SPEC))
    requests = make_requests(7, seed=5)
    sampling = replace(SAMPLING, temperature=0.0)
    wanted = []
    for request in requests:
        ids = torch.tensor([request.prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=sampling.max_response_tokens,
            do_sample=False,
            eos_token_id=list(sampling.eos_ids),
            pad_token_id=0,
        )
        wanted.append(out[0, len(request.prompt) :].tolist())
    assert len({len(tokens) for tokens in wanted}) > 1, "the test wants responses of several lengths"
    for layout in (Layout(), Layout(2, 2)):
        for got in run_layout(layout, requests, sampling, num_slots=3):
            assert [response.tokens for response in got] == wanted


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("tests.runtime.generation_service:GenerationService") as engine:
        engine.start([0, 1, 2, 3])
        yield engine


@pytest.mark.parametrize("tp, pp", [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)])
def test_worker_processes_draw_what_the_plain_loop_draws(
    plain_shard, engine, tp, pp, epochs=itertools.count(1)
) -> None:
    requests = make_requests(11, seed=4)
    order = {
        "layout": Layout(tp, pp),
        "requests": requests,
        "sampling": SAMPLING,
        "num_slots": 4,
        "epoch": next(epochs),
    }
    answers = run_command(engine, "run", dict.fromkeys(range(tp * pp), order), label="generate", step=None)
    wanted = run_plain(plain_shard, requests, SAMPLING)
    for rank in range(tp * pp):
        assert_same(answers[rank], wanted)
        assert answers[rank] == answers[0], "ranks disagree bitwise"


class CountingShard:
    """A one-rank shard that counts the rows it computes; the token after position p of a prompt `(n, ...)` is known:
    it is 0, the EOS, once n tokens were drawn, else 1."""

    spec, layout, rank = SPEC, Layout(), 0
    is_first = is_last = True
    vocab_range = (0, SPEC.vocab)

    def __init__(self) -> None:
        self.prefills: list[tuple[int, ...]] = []
        self.decodes: list[int] = []
        self.left: dict[int, int] = {}

    def parameters(self):
        yield torch.zeros(1)

    def _hidden(self, left: list[int]) -> Tensor:
        hidden = torch.zeros(len(left), SPEC.hidden, dtype=torch.float64)
        hidden[:, 0] = torch.tensor([float(n) for n in left])
        return hidden

    def __call__(self, x, batch, *, cache, slots):
        self.prefills.append(tuple(slots))
        firsts = x[batch.positions == 0].tolist()
        self.left.update({slot: n - 1 for slot, n in zip(slots, firsts, strict=True)})
        return self._hidden([n - 1 for n, length in zip(firsts, batch.lengths, strict=True) for _ in range(length)])

    def decode(self, x, positions, cache):
        rows = len(positions)
        self.decodes.append(rows)
        for slot in range(rows):
            self.left[slot] -= 1
        return self._hidden([self.left[slot] for slot in range(rows)])

    def logits(self, hidden):
        logits = torch.full((len(hidden), SPEC.vocab), -100.0, dtype=torch.float64)
        logits[torch.arange(len(hidden)), (hidden[:, 0] > 0).long()] = 0.0
        return logits


class CountingCache:
    def __init__(self, shard: CountingShard, num_slots: int) -> None:
        self.shard, self.num_slots, self.max_tokens = shard, num_slots, 64

    def part(self, start: int, num_slots: int) -> CountingCache:
        return self

    def move_slot(self, source: int, target: int, length: int) -> None:
        self.shard.left[target] = self.shard.left[source]


def test_slots_are_refilled_at_once_and_finished_ones_cost_nothing() -> None:
    lengths = [5, 1, 9, 3, 3, 2, 7, 1, 4]
    requests = [Request(i, (n, 1)) for i, n in enumerate(lengths)]
    shard = CountingShard()
    sampling = Sampling(0, 0, 1.0, 1.0, max_response_tokens=20, eos_ids=(0,))
    responses = generate(shard, requests, sampling, cache=CountingCache(shard, 3), replica=Alone(), tp=Alone())
    assert [len(r.tokens) for r in responses] == lengths
    assert all(r.ended and r.tokens[-1] == 0 for r in responses)
    assert sum(shard.decodes) == sum(lengths) - len(lengths)
    assert sum(map(len, shard.prefills)) == len(lengths)
    # Full until the queue is empty, then only ever fewer rows; without refilling 8 + 2 + 6 decodes would be needed.
    assert shard.decodes == sorted(shard.decodes, reverse=True)
    assert shard.decodes.count(3) >= 7
    assert len(shard.decodes) < 16


def test_an_eos_on_the_last_position_counts_as_ended() -> None:
    shard = CountingShard()
    sampling = Sampling(0, 0, 1.0, 1.0, max_response_tokens=4, eos_ids=(0,))
    requests = [Request(0, (4,)), Request(1, (5,))]
    responses = generate(shard, requests, sampling, cache=CountingCache(shard, 2), replica=Alone(), tp=Alone())
    assert [(r.tokens, r.ended) for r in responses] == [([1, 1, 1, 0], True), ([1, 1, 1, 1], False)]


@pytest.mark.parametrize(
    "prompt, max_response_tokens, field",
    [((), 4, "prompt of sample 8"), ((1,) * 22, 4, "25 cached tokens"), ((1,), 0, "max_response_tokens=0")],
)
def test_what_does_not_fit_is_refused(prompt, max_response_tokens, field) -> None:
    sampling = replace(SAMPLING, max_response_tokens=max_response_tokens)
    with pytest.raises(ValueError, match=field):
        run_layout(Layout(), [Request(8, prompt)], sampling, num_slots=2)
