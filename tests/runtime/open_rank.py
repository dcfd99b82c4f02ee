"""A worker whose optimizer can be looked into, and that uses memory when told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from nereus.layout import owned_slices
from nereus.runtime.rank import Rank
from nereus.staged_state import PREFIXES


class OpenRank(Rank):
    """The real worker, with two more commands."""

    def use_memory(self, num_bytes: int) -> None:
        """Fill some memory and free it, but for its end: the heap stays as large."""
        used = [torch.ones(2**18) for _ in range(-(-num_bytes // 2**20))]
        self._kept = used.pop()

    def read_state(
        self, model_stage: str, prefixes: Sequence[str] = PREFIXES
    ) -> list[tuple[Sequence[int], str, np.ndarray]]:
        """Return the parameters and moments that this rank owns, as (starts, name, array), from live memory.

        Args:
            prefixes: of those wanted; an answer takes as much memory again, and a device may be nearly full.
        """
        unit = self.units[model_stage]
        assert unit.staged is not None
        parts = owned_slices(unit.shard.spec, unit.shard.layout, unit.shard.rank)
        named = [replace(part, name=prefix + part.name) for prefix in prefixes for part in parts if part.num_elements]
        return [(part.starts, part.name, unit.staged.find(part).detach().numpy()) for part in named]
