"""Keys and values of the tokens so far, in static slots that are allocated once and reused."""

from __future__ import annotations

import torch
from torch import Tensor

from nereus.layout import Layout, partition, stage_layers
from nereus.model.spec import ModelSpec


class KvCache:
    """Slots for `num_slots` sequences of at most `max_tokens` tokens, for the layers and KV heads of one rank.

    Memory is zero pages until a position is first written, so slots that stay unused cost nothing on a CPU.

    Attributes:
        keys, values: per local layer [num_slots, kv_local, max_tokens, head_dim].
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        *,
        num_slots: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        start, stop = partition(spec.kv_heads, layout.tp)[layout.tp_rank(rank)]
        num_layers = len(stage_layers(spec, layout, layout.stage(rank)))
        shape = (2, num_layers, num_slots, stop - start, max_tokens, spec.head_dim)
        # Zeros, not empty: what a mask hides is multiplied by 0, and 0 * nan would be nan.
        self._set(torch.zeros(shape, dtype=dtype, device=device))

    def _set(self, storage: Tensor) -> None:
        self._storage = storage
        self.keys = list(storage[0])
        self.values = list(storage[1])
        self._flat = [(k.view(-1, k.shape[-1]), v.view(-1, v.shape[-1])) for k, v in zip(*storage, strict=True)]

    @property
    def num_slots(self) -> int:
        return self._storage.shape[2]

    @property
    def max_tokens(self) -> int:
        return self._storage.shape[4]

    def part(self, start: int, num_slots: int) -> KvCache:
        """Return slots [start, start + num_slots) as a cache of its own on the same memory."""
        part = object.__new__(KvCache)
        part._set(self._storage[:, :, start : start + num_slots])
        return part

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where `write` puts token i: slot slots[i], position positions[i]; both [N] int64."""
        kv_heads, max_tokens = self._storage.shape[3:5]
        first = slots * (kv_heads * max_tokens) + positions
        heads = torch.arange(kv_heads, device=slots.device) * max_tokens
        return (first[:, None] + heads).view(-1)

    def write(self, index: int, rows: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [N, kv_local, head_dim] of the local layer `index` to `rows`."""
        keys, values = self._flat[index]
        keys.index_copy_(0, rows, key.reshape(-1, key.shape[-1]))
        values.index_copy_(0, rows, value.reshape(-1, value.shape[-1]))

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another (compaction: active slots are 0..n-1)."""
        self._storage[:, :, target, :, :length] = self._storage[:, :, source, :, :length]
