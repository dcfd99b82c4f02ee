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
        shape = (num_layers, 2, num_slots, stop - start, max_tokens, spec.head_dim)
        # Zeros, not empty: what a mask hides is multiplied by 0, and 0 * nan would be nan.
        self._set(torch.zeros(shape, dtype=dtype, device=device), 0, num_slots)

    def _set(self, storage: Tensor, first_slot: int, num_slots: int) -> None:
        self._storage = storage
        self._first_slot = first_slot
        self.num_slots = num_slots
        self._slots = storage[:, :, first_slot : first_slot + num_slots]
        self.keys, self.values = list(self._slots[:, 0]), list(self._slots[:, 1])
        self._flat = [layer.view(-1, layer.shape[-1]) for layer in storage]

    @property
    def max_tokens(self) -> int:
        return self._storage.shape[4]

    def part(self, start: int, num_slots: int) -> KvCache:
        """Return slots [start, start + num_slots) as a cache of its own on the same memory."""
        assert start + num_slots <= self.num_slots, (start, num_slots, self.num_slots)
        part = object.__new__(KvCache)
        part._set(self._storage, self._first_slot + start, num_slots)
        return part

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Return where `write` puts token i: slot slots[i], position positions[i]; both [N] int64."""
        all_slots, kv_heads, max_tokens = self._storage.shape[2:5]
        first = (slots + self._first_slot) * (kv_heads * max_tokens) + positions
        heads = torch.arange(kv_heads, device=slots.device) * max_tokens
        values = all_slots * kv_heads * max_tokens
        return (first[:, None] + torch.cat((heads, heads + values))).view(-1)

    def window(self, num_slots: int, length: int) -> list[tuple[Tensor, Tensor]]:
        """Return per local layer views of the first slots and positions, [num_slots, kv_local, length, head_dim]."""
        keys, values = self._slots[:, :, :num_slots, :, :length].unbind(1)
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def write(self, index: int, rows: Tensor, key_value: Tensor) -> None:
        """Write the keys, then values, [N, 2 * kv_local, head_dim] of the local layer `index` to `rows`."""
        self._flat[index].index_copy_(0, rows, key_value.reshape(-1, key_value.shape[-1]))

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another (compaction: active slots are 0..n-1)."""
        self._slots[:, :, target, :, :length] = self._slots[:, :, source, :, :length]
