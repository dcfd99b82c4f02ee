"""Micro-batches through the pipeline stages of one replica: forward only, and one-forward-one-backward.

Sends are asynchronous and receives wait, so two neighbours never wait for each other: a stage's receive is matched by
a send that its neighbour posts before anything that depends on this stage's later work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nereus.model.decoder import DecoderShard
from nereus.runtime.communicator import Pending
from nereus.runtime.links import Links
from nereus.runtime.samples import PackedSamples

# How many sent activations may be in flight before the sender waits: bounds memory.
_MOST_IN_FLIGHT = 2


def _receive(shard: DecoderShard, links: Links, num_tokens: int, source: int, tag: int, device: torch.device) -> Tensor:
    buffer = torch.empty(num_tokens, shard.spec.hidden, dtype=shard.dtype, device=device)
    links.replica.recv(buffer, source, tag).wait()
    return buffer


def run_forward(
    shard: DecoderShard,
    links: Links,
    micro_batches: Sequence[PackedSamples],
    head: Callable[[Tensor, PackedSamples], Tensor],
) -> list[Tensor]:
    """Run forward passes without gradients; the last stage returns `head(hidden, packed)` per micro-batch."""
    outputs: list[Tensor] = []
    in_flight: deque[tuple[Pending, Tensor]] = deque()
    for index, packed in enumerate(micro_batches):
        x = packed.token_ids
        if not links.is_first:
            x = _receive(shard, links, packed.num_tokens, links.previous, index, x.device)
        hidden = shard(x, packed.batch)
        if links.is_last:
            outputs.append(head(hidden, packed))
            continue
        hidden = hidden.contiguous()
        in_flight.append((links.replica.send(hidden, links.next, index), hidden))
        if len(in_flight) > _MOST_IN_FLIGHT:
            in_flight.popleft()[0].wait()
    for pending, _ in in_flight:
        pending.wait()
    return outputs


class OneForwardOneBackward:
    """The 1F1B schedule: stage s runs pp - s - 1 forwards ahead, then one backward for each forward.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
    """

    def __init__(self, shard: DecoderShard, links: Links, *, recompute: bool) -> None:
        self.shard = shard
        self.links = links
        self.recompute = recompute
        # Oldest first: index, received input, output (loss on the last stage), the send of the output.
        self.live: deque[tuple[int, Tensor | None, Tensor, Pending | None]] = deque()
        self.returned: deque[tuple[Pending, Tensor]] = deque()

    def run(self, micro_batches: Sequence[PackedSamples], loss: Callable[[Tensor, PackedSamples], Tensor]) -> None:
        """Run forward and backward of all micro-batches; gradients end up in the parameters' `grad`.

        Args:
            loss: called on the last stage with the final hidden [N, H]; returns the loss to differentiate (a sum).
        """
        warm_up = min(self.links.layout.pp - self.links.stage - 1, len(micro_batches))
        for index in range(warm_up):
            self._forward(index, micro_batches[index], loss)
        for index in range(warm_up, len(micro_batches)):
            self._forward(index, micro_batches[index], loss)
            self._backward()
        while self.live:
            self._backward()
        while self.returned:
            self.returned.popleft()[0].wait()

    def _forward(self, index: int, packed: PackedSamples, loss: Callable[[Tensor, PackedSamples], Tensor]) -> None:
        links, x, received = self.links, packed.token_ids, None
        if not links.is_first:
            received = _receive(self.shard, links, packed.num_tokens, links.previous, 2 * index, x.device)
            x = received.requires_grad_()
        hidden = self.shard(x, packed.batch, recompute=self.recompute)
        if links.is_last:
            self.live.append((index, received, loss(hidden, packed), None))
            return
        hidden = hidden.contiguous()
        self.live.append((index, received, hidden, links.replica.send(hidden.detach(), links.next, 2 * index)))

    def _backward(self) -> None:
        index, received, output, pending = self.live.popleft()
        links = self.links
        if links.is_last:
            output.backward()
        else:
            assert pending is not None
            gradient = torch.empty_like(output)
            links.replica.recv(gradient, links.next, 2 * index + 1).wait()
            pending.wait()
            output.backward(gradient)
        if received is not None:
            assert received.grad is not None
            gradient = received.grad.contiguous()
            self.returned.append((links.replica.send(gradient, links.previous, 2 * index + 1), gradient))
            if len(self.returned) > _MOST_IN_FLIGHT:
                self.returned.popleft()[0].wait()
