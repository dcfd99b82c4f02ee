"""The slots of one wave as tensors: what each slot feeds next, where, and with which noise it draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nereus.model.kv_cache import KvCache
from nereus.runtime.communicator import Pending
from nereus.runtime.slots import Decode, Prefill, SlotSchedule

Rows = slice | list[int]


@dataclass
class Outcome:
    """What a pass drew for its slots, float64 [2, rows]: token ids (exact below 2^53) and log-probs.

    `pending` are sends on the last stage; on the others `values` is valid once they are done.
    """

    work: Prefill | Decode
    values: Tensor
    pending: list[Pending]


class Wave:
    """Slots that are computed together; row i of every tensor belongs to slot i.

    Attributes:
        tokens: [slots] int64, drawn and not yet fed.
        positions: [slots] int64, of that token in its sequence.
        drawn: [slots, 1] int64, response tokens drawn so far.
        noise: [slots, num_draws] float64 in [0, 1), one number for each token of the response.
        outcome: of the last pass, until its tokens are taken.
    """

    def __init__(
        self, schedule: SlotSchedule, cache: KvCache, num_slots: int, num_draws: int, device: torch.device
    ) -> None:
        self.schedule = schedule
        self.cache = cache
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.drawn = torch.zeros(num_slots, 1, dtype=torch.int64, device=device)
        self.noise = torch.zeros(num_slots, num_draws, dtype=torch.float64, device=device)
        self.outcome: Outcome | None = None

    def admit(self, slots: Sequence[int], prompt_tokens: Sequence[int], noise: Sequence[Tensor]) -> None:
        """Begin responses in `slots`, after prompts of these lengths; `noise` is left out where none is drawn."""
        rows = list(slots)
        self.positions[rows] = torch.tensor(prompt_tokens, device=self.positions.device)
        self.drawn[rows] = 0
        if noise:
            self.noise[rows] = torch.stack(list(noise)).to(self.noise.device)

    def move(self, source: int, target: int, length: int) -> None:
        """Let a slot go on in another place, with its first `length` cached tokens."""
        self.cache.move_slot(source, target, length)
        for rows in (self.tokens, self.positions, self.drawn, self.noise):
            rows[target] = rows[source]

    def take_noise(self, rows: Rows) -> Tensor:
        """Return each row's number for the token it draws now, [rows] float64, and count that token."""
        noise = self.noise[rows].gather(1, self.drawn[rows])[:, 0]
        self.drawn[rows] += 1
        return noise


def rows_of(work: Prefill | Decode) -> Rows:
    """Return the index of a pass's slots; for a decode a slice, which makes views and copies nothing."""
    return list(work.slots) if isinstance(work, Prefill) else slice(0, work.num_rows)
