"""Responses from one replica: continuous batching over the slots of a KV cache, with tensor and pipeline parallelism.

Every rank of the replica runs the same schedule (slots.py). With pp stages the slots form up to pp waves, and the
ranks take turns at them in one fixed order, turn 0, 1, 2, ...:

    stage 0      turn 0 | turn 1 | turn 2 ...          hidden states go up to the next stage,
    stage 1               turn 0 | turn 1 | turn 2     drawn tokens come down from the last stage to all others

Why no rank waits for ever: sends don't block, and what a rank waits for in turn t of stage s is either the hidden
states of turn t, made by stage s - 1, or the tokens of this wave's last turn t' < t, made by the last stage. So every
wait is for an event that is earlier in the order (turn, stage), and tensor-parallel ranks, which wait for each other
inside a forward pass, are at the same (turn, stage). A rank waits for its own sends only when it takes up the wave
again; by then the receiver has asked for the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from nereus.limits import PREFILL_TOKENS
from nereus.model.batch import PackedBatch
from nereus.model.decoder import DecoderShard
from nereus.model.group import Group
from nereus.model.kv_cache import KvCache
from nereus.ppo.sampling import sample_tokens
from nereus.random import uniforms
from nereus.runtime.communicator import Communicator
from nereus.runtime.slots import Decode, Prefill, RequestQueue, SlotSchedule, wave_slots
from nereus.runtime.wave import Outcome, Wave, rows_of

# Tags of the two kinds of messages; within a kind they are read in the order of turns, which is that of sending.
_HIDDEN, _DRAWN = 0, 1


@dataclass(frozen=True)
class Request:
    """A prompt to continue; `sample_id` names its sampling noise."""

    sample_id: int
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: temperature 0 takes the most likely one; no `eos_ids` means a fixed length."""

    seed: int
    step: int
    temperature: float
    top_p: float
    max_response_tokens: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Response:
    """What was drawn for a request: `tokens` with the EOS, their log-probs in nats, and whether an EOS ended it."""

    sample_id: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False


def generate(
    shard: DecoderShard,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    cache: KvCache,
    replica: Communicator,
    tp: Group,
    max_prefill_tokens: int = PREFILL_TOKENS,
) -> list[Response]:
    """Return the responses in request order; all ranks of the replica call it alike and get the same.

    Admission follows the request order, a finished sequence's slot is refilled before the next token of the others,
    and the passes depend on order and lengths only, so a run on the same plan is repeated bit by bit.

    Args:
        shard: this rank's part of an actor; `prepare_decode` has been called since its weights changed, if at all.
        cache: of this shard; what it holds is overwritten. Slots beyond the requests stay untouched.
        replica: over the tp * pp ranks (rank = stage * tp + tp_rank).
        tp: over this stage's ranks.
        max_prefill_tokens: most prompt tokens in one pass, unless a single prompt has more.

    Raises:
        ValueError: a prompt is empty, or doesn't fit the cache together with the longest response.
        FloatingPointError: logits that no token can be drawn from.
    """
    _check(requests, sampling, cache)
    with torch.no_grad():
        return _Generation(shard, requests, sampling, cache, replica, tp, max_prefill_tokens).run()


def _check(requests: Sequence[Request], sampling: Sampling, cache: KvCache) -> None:
    if sampling.max_response_tokens < 1:
        raise ValueError(f"max_response_tokens={sampling.max_response_tokens} leaves nothing to draw; give at least 1.")
    for request in requests:
        if not request.prompt:
            raise ValueError(f"The prompt of sample {request.sample_id} is empty; give it at least one token.")
        # The last token is drawn, never fed.
        needed = len(request.prompt) + sampling.max_response_tokens - 1
        if needed > cache.max_tokens:
            raise ValueError(
                f"Sample {request.sample_id} needs {needed} cached tokens ({len(request.prompt)} of the prompt), but "
                f"the KV cache holds {cache.max_tokens} a slot; make the cache longer or the response shorter."
            )


class _Generation:
    """One call of `generate` on one rank."""

    def __init__(
        self,
        shard: DecoderShard,
        requests: Sequence[Request],
        sampling: Sampling,
        cache: KvCache,
        replica: Communicator,
        tp: Group,
        max_prefill_tokens: int,
    ) -> None:
        self.shard, self.requests, self.sampling, self.replica, self.tp = shard, requests, sampling, replica, tp
        weight = next(iter(shard.parameters()))
        self.device, self.dtype = weight.device, weight.dtype
        self.draws = shard.is_last and sampling.temperature > 0
        self.eos_ids = frozenset(sampling.eos_ids)
        self.responses = [Response(request.sample_id) for request in requests]
        queue = RequestQueue([len(request.prompt) for request in requests])
        self.waves = []
        for start, stop in wave_slots(len(requests), cache.num_slots, shard.layout.pp):
            schedule = SlotSchedule(queue, stop - start, max_prefill_tokens=max_prefill_tokens)
            window = cache.part(start, stop - start)
            self.waves.append(Wave(schedule, window, stop - start, sampling.max_response_tokens, self.device))

    def run(self) -> list[Response]:
        waves = list(self.waves)
        while waves:
            for wave in list(waves):
                self._take_outcome(wave)
                work = wave.schedule.next_pass()
                if work is None:
                    waves.remove(wave)
                    continue
                self._compute(wave, work)
        return self.responses

    def _compute(self, wave: Wave, work: Prefill | Decode) -> None:
        """Run this rank's part of a pass and post the messages it makes and waits for."""
        hidden = self._prefill(wave, work) if isinstance(work, Prefill) else self._decode(wave, work)
        layout, rank = self.shard.layout, self.shard.rank
        if self.shard.is_last:
            values = self._draw(hidden, wave.take_noise(rows_of(work)))
            below = range(layout.tp_rank(rank), rank, layout.tp)
            pending = [self.replica.send(values, peer, _DRAWN) for peer in below]
        else:
            last = (layout.pp - 1) * layout.tp + layout.tp_rank(rank)
            values = torch.empty(2, len(work.slots), dtype=torch.float64, device=self.device)
            pending = [self.replica.send(hidden.contiguous(), rank + layout.tp, _HIDDEN)]
            pending.append(self.replica.recv(values, last, _DRAWN))
        wave.outcome = Outcome(work, values, pending)

    def _prefill(self, wave: Wave, work: Prefill) -> Tensor:
        """Return hidden states of whole prompts; on the last stage of their last tokens only."""
        admitted = [self.requests[index] for index in work.requests]
        batch = PackedBatch.of([len(request.prompt) for request in admitted], device=self.device)
        if self.shard.is_first:
            x = torch.tensor([token for request in admitted for token in request.prompt], device=self.device)
        else:
            x = self._receive(batch.num_tokens)
        hidden = self.shard(x, batch, cache=wave.cache, slots=work.slots)
        wave.admit(work.slots, batch.lengths, [self._noise(request) for request in admitted] if self.draws else [])
        if not self.shard.is_last:
            return hidden
        return hidden[torch.tensor(batch.lengths, device=self.device).cumsum(0) - 1]

    def _noise(self, request: Request) -> Tensor:
        """Return the numbers of all tokens of a response, so that a draw depends on nothing but its position."""
        sampling = self.sampling
        return torch.from_numpy(uniforms(sampling.seed, sampling.step, request.sample_id, sampling.max_response_tokens))

    def _decode(self, wave: Wave, work: Decode) -> Tensor:
        for move in work.moves:
            wave.move(move.source, move.target, move.length)
        positions = wave.positions[: work.num_rows]
        x = wave.tokens[: work.num_rows] if self.shard.is_first else self._receive(work.num_rows)
        hidden = self.shard.decode(x, positions, wave.cache)
        positions += 1
        return hidden

    def _receive(self, num_rows: int) -> Tensor:
        hidden = torch.empty(num_rows, self.shard.spec.hidden, dtype=self.dtype, device=self.device)
        self.replica.recv(hidden, self.shard.rank - self.shard.layout.tp, _HIDDEN).wait()
        return hidden

    def _draw(self, hidden: Tensor, noise: Tensor) -> Tensor:
        tokens, logprobs = sample_tokens(
            self.shard.logits(hidden),
            noise,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            group=self.tp,
            vocab_start=self.shard.vocab_range[0],
        )
        return torch.stack([tokens.double(), logprobs])

    def _take_outcome(self, wave: Wave) -> None:
        """Give the tokens of the wave's last pass to their responses and free the slots of those that ended."""
        outcome, wave.outcome = wave.outcome, None
        if outcome is None:
            return
        for pending in outcome.pending:
            pending.wait()
        wave.tokens[rows_of(outcome.work)] = outcome.values[0].long()
        tokens, logprobs = outcome.values.tolist()
        ended = []
        for slot, token, logprob in zip(outcome.work.slots, tokens, logprobs, strict=True):
            if self._append(wave.schedule.request_at(slot), int(token), logprob):
                ended.append(slot)
        wave.schedule.finish(ended)

    def _append(self, index: int, token: int, logprob: float) -> bool:
        """Add a token to a response; return True when it is the last one."""
        response = self.responses[index]
        response.tokens.append(token)
        response.logprobs.append(logprob)
        if token in self.eos_ids:
            self.responses[index] = replace(response, ended=True)
            return True
        return len(response.tokens) == self.sampling.max_response_tokens
