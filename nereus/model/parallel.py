"""The pairs of identity and all-reduce that make tensor-parallel layers differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nereus.model.group import Group


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.group.all_reduce(grad)
        return grad, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        group.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def enter_parallel(x: Tensor, group: Group) -> Tensor:
    """Hand a tensor that all ranks hold to layers of which each rank has a part: gradients are summed over ranks."""
    if group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    return _Enter.apply(x, group)  # type: ignore[no-any-return]


def leave_parallel(x: Tensor, group: Group) -> Tensor:
    """Sum the ranks' partial results, which are used up; the gradient is the same on all ranks already."""
    if group.size == 1:
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        return _Leave.apply(x, group)  # type: ignore[no-any-return]
    x = x.contiguous()
    group.all_reduce(x)
    return x
