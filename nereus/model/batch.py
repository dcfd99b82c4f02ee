"""Sequences of different lengths laid end to end, so that no work is done on padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Which tokens of a packed [N] or [N, H] tensor belong to which sequence.

    Example: lengths (3, 2) mean N = 5 and positions [0, 1, 2, 0, 1].

    Attributes:
        lengths: tokens of each sequence, in packed order.
        positions: [N] int64, the position of each token in its own sequence.
    """

    lengths: tuple[int, ...]
    positions: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedBatch:
        """Build the batch of sequences that each begin at position 0."""
        assert lengths and all(length > 0 for length in lengths), lengths
        longest = torch.arange(max(lengths), device=device)
        return cls(tuple(lengths), torch.cat([longest[:length] for length in lengths]))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)
