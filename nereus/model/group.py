"""What the model needs of the tensor-parallel ranks that share its layers."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks of one tensor-parallel group; the runtime's communicators have this shape."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Reduce a contiguous tensor over the ranks, in place and in rank order."""

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the ranks' tensors in rank order; they may differ in dim 0."""


class Alone:
    """The group of one rank: every reduction is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        return

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]
