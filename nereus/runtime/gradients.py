"""Gradients of one training rank: one flat buffer, the sums that layouts require, and the norm of the whole model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nereus.layout import owned_slices
from nereus.model.decoder import DecoderShard
from nereus.runtime.links import Links


class GradientBuffer:
    """One flat buffer with a view for each parameter; it exists only while its model-stage trains.

    Below float64 it is float32, whatever the compute dtype. Matrix products add their weight gradients to the views at
    once (`main_grad`). What comes through autograd is added in place where the dtypes agree; for bfloat16 a hook adds
    it in float32 and frees it.
    """

    def __init__(self, shard: DecoderShard) -> None:
        self.shard = shard
        self.parameters: dict[str, nn.Parameter] = dict(shard.named_parameters())
        first = next(iter(self.parameters.values()))
        self.dtype = torch.promote_types(first.dtype, torch.float32)
        # Not torch.zeros: its calloc gets no huge pages, and `zero` comes before every update anyway.
        self.flat = torch.empty(sum(p.numel() for p in self.parameters.values()), dtype=self.dtype, device=first.device)
        self.views: dict[str, Tensor] = {}
        offset = 0
        for name, parameter in self.parameters.items():
            self.views[name] = self.flat[offset : offset + parameter.numel()].view(parameter.shape)
            offset += parameter.numel()
        self._hooks = [self._attach(name, p) for name, p in self.parameters.items()]

    def _attach(self, name: str, parameter: nn.Parameter) -> torch.utils.hooks.RemovableHandle | None:
        view = self.views[name]
        parameter.main_grad = view  # type: ignore[attr-defined]
        if parameter.dtype == self.dtype:
            parameter.grad = view
            return None

        def add(p: nn.Parameter) -> None:
            if p.grad is not None:
                view.add_(p.grad)
                p.grad = None

        return parameter.register_post_accumulate_grad_hook(add)

    def view_of(self, parameter: nn.Parameter) -> Tensor:
        return next(self.views[name] for name, p in self.parameters.items() if p is parameter)

    def zero(self) -> None:
        self.flat.zero_()

    def release(self) -> None:
        """Detach from the parameters and free the buffer."""
        for hook, parameter in zip(self._hooks, self.parameters.values(), strict=True):
            parameter.grad = None
            del parameter.main_grad  # type: ignore[attr-defined]
            if hook is not None:
                hook.remove()
        self.views.clear()
        self.flat = torch.empty(0)


def reduce_gradients(buffer: GradientBuffer, links: Links) -> None:
    """Make every rank's gradients the sums over the minibatch: over tp, over tied copies, then over replicas.

    q_norm and k_norm see only a rank's own heads, so they are summed over tp. A tied embedding is used by the first
    and the last stage, so their gradients are added, in that order on both. All other replicated tensors have equal
    gradients on every holder. Ranks of one slice in all replicas are summed last, in replica order.
    """
    if links.tp.size > 1:
        for parameter in buffer.shard.tp_summed:
            links.tp.all_reduce(buffer.view_of(parameter))
    if buffer.shard.tied_embedding is not None:
        _add_tied(buffer.view_of(buffer.shard.tied_embedding), links)
    if links.dp.size > 1:
        links.dp.all_reduce(buffer.flat)


_TIED_TAG = 1 << 20
# Elements of one message between the two holders of a tied embedding: bounds the buffers that it takes.
_TIED_PIECE = 1 << 20


def _add_tied(own: Tensor, links: Links) -> None:
    last_stage = (links.layout.pp - 1) * links.layout.tp
    peer = links.rank + last_stage if links.is_first else links.rank - last_stage
    for mine in own.view(-1).split(_TIED_PIECE):
        other = torch.empty_like(mine)
        if links.is_first:
            pending = links.replica.send(mine, peer, _TIED_TAG)
            links.replica.recv(other, peer, _TIED_TAG).wait()
        else:  # in the opposite order, for transports whose sends wait for their receivers
            links.replica.recv(other, peer, _TIED_TAG).wait()
            pending = links.replica.send(mine, peer, _TIED_TAG)
        pending.wait()
        mine.add_(other)  # addition of two numbers commutes, so both stages get the same bits


def compute_gradient_norm(buffer: GradientBuffer, links: Links) -> float:
    """Return the 2-norm of the whole model's gradients in float64: every element counted once, by its owner."""
    owned = owned_slices(buffer.shard.spec, links.layout, links.rank)
    squares = [_sum_of_squares(v.of(buffer.views[v.parameter])) for v in buffer.shard.views() if v.slice in owned]
    zero = torch.zeros((), dtype=torch.float64, device=buffer.flat.device)
    total = torch.stack([zero, *squares]).sum().reshape(1)
    links.replica.all_reduce(total)
    return float(total.item()) ** 0.5


# Rows are lifted to float64 in pieces of this many elements, so that the norm needs no second gradient buffer.
_NORM_PIECE = 1 << 20


def _sum_of_squares(gradient: Tensor) -> Tensor:
    flat = gradient.reshape(-1)
    if flat.dtype == torch.float64:
        return torch.dot(flat, flat)
    pieces: Sequence[Tensor] = [piece.double() for piece in flat.split(_NORM_PIECE)]
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum()
