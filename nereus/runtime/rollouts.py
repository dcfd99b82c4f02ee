"""The rollouts of one step in the driver: what was drawn, and the columns that inference adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nereus.data import PromptTokens
from nereus.ppo.advantages import compute_gae, whiten_advantages
from nereus.ppo.kl import apply_no_eos_penalty, compute_kl, compute_token_rewards
from nereus.runtime.generation import Response
from nereus.runtime.samples import Sample


@dataclass
class Rollouts:
    """B samples in ascending sample id. `columns` holds per sample an array [R] of its response tokens, float64.

    Its names: "generation_logprobs" (the sampler's), "old_logprobs", "ref_logprobs", "old_values", "advantages",
    "returns".
    """

    sample_ids: list[int]
    prompts: list[PromptTokens]
    responses: list[Response]
    columns: dict[str, list[np.ndarray]] = field(default_factory=dict)
    scores: Tensor | None = None

    def __post_init__(self) -> None:
        assert [r.sample_id for r in self.responses] == self.sample_ids
        self.columns["generation_logprobs"] = [np.asarray(r.logprobs, dtype=np.float64) for r in self.responses]

    def __len__(self) -> int:
        return len(self.sample_ids)

    @property
    def response_lengths(self) -> list[int]:
        return [len(r.tokens) for r in self.responses]

    @property
    def total_lengths(self) -> list[int]:
        return [len(p.token_ids) + len(r.tokens) for p, r in zip(self.prompts, self.responses, strict=True)]

    def sample(self, index: int, columns: Sequence[str] = ()) -> Sample:
        """Return one sample as workers take it, with some of its columns."""
        prompt, response = self.prompts[index], self.responses[index]
        tokens = np.asarray([*prompt.token_ids, *response.tokens], dtype=np.int64)
        return Sample(tokens, len(prompt.token_ids), {name: self.columns[name][index] for name in columns})

    def mask(self) -> Tensor:
        """Return [B, T] bool, True at response tokens."""
        lengths = torch.tensor(self.response_lengths)
        return torch.arange(int(lengths.max()))[None, :] < lengths[:, None]

    def padded(self, column: str) -> Tensor:
        """Return a column as [B, T] float64, 0 outside the responses."""
        result = torch.zeros(len(self), max(self.response_lengths), dtype=torch.float64)
        for row, values in zip(result, self.columns[column], strict=True):
            row[: len(values)] = torch.from_numpy(values)
        return result

    def store(self, column: str, padded: Tensor) -> None:
        """Keep a padded [B, T] tensor as a column."""
        self.columns[column] = [row[:n].numpy() for row, n in zip(padded, self.response_lengths, strict=True)]


def estimate_advantages(
    rollouts: Rollouts, *, kl_coef: float, no_eos_penalty: float, gamma: float, lam: float
) -> float:
    """Fill "advantages" (whitened over all response tokens of the step) and "returns" in float64.

    Returns:
        The mean over samples of the KL to the reference summed over the response (k1), for an adaptive coefficient.
    """
    assert rollouts.scores is not None
    mask = rollouts.mask()
    logprobs, ref_logprobs = rollouts.padded("old_logprobs"), rollouts.padded("ref_logprobs")
    has_eos = torch.tensor([r.ended for r in rollouts.responses])
    scores = apply_no_eos_penalty(rollouts.scores, has_eos, no_eos_penalty)
    rewards = compute_token_rewards(scores, logprobs, ref_logprobs, mask, kl_coef=kl_coef)
    advantages, returns = compute_gae(rewards, rollouts.padded("old_values"), mask, gamma=gamma, lam=lam)
    rollouts.store("advantages", whiten_advantages(advantages, mask))
    rollouts.store("returns", returns)
    return float(compute_kl(logprobs, ref_logprobs, "k1").masked_fill(~mask, 0.0).sum(dim=1).mean())
