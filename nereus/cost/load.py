"""What one step works on: how many samples, and how long they are."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from nereus.cost.rank_memory import Workload
from nereus.limits import STAGING_BUFFER_BYTES

Algorithm = Literal["ppo", "grpo"]

# 95% of a normal distribution lie below the mean plus this many standard deviations.
_NORMAL_95 = 1.645


@dataclass(frozen=True)
class StepLoad:
    """The work of one step: means for time; the 95th percentile for memory and for the slowest sample of generation.

    `response_tokens_longest` is the length of the longest response, where that is known; None: the 95th percentile.
    `slot_tokens` is what a slot of the KV cache holds, where that isn't what a sequence has; `staging_buffer_bytes` are
    those of a worker that writes staged state.

    Example: StepLoad(1024, minibatches=4, prompt_tokens=512, response_tokens=1147.5, response_tokens_p95=1339).
    """

    samples: int
    minibatches: int
    prompt_tokens: float
    response_tokens: float
    response_tokens_p95: float
    epochs: int = 1
    response_tokens_longest: float | None = None
    algorithm: Algorithm = field(default="ppo")
    slot_tokens: int | None = None
    staging_buffer_bytes: int = STAGING_BUFFER_BYTES

    def __post_init__(self) -> None:
        for name in ("samples", "minibatches", "epochs", "prompt_tokens", "response_tokens"):
            if not getattr(self, name) > 0:
                raise ValueError(f"workload: {name} is {getattr(self, name)}; it must be above 0.")
        if self.minibatches > self.samples:
            raise ValueError(
                f"workload: {self.minibatches} minibatches of {self.samples} samples would be empty; use fewer."
            )
        if self.response_tokens_p95 < self.response_tokens:
            raise ValueError(
                f"workload: response_tokens_p95 is {self.response_tokens_p95}, below the mean of "
                f"{self.response_tokens}; give one that isn't."
            )

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of a sample with its prompt."""
        return self.prompt_tokens + self.response_tokens

    @property
    def response_variance(self) -> float:
        """Variance of the response length in tokens^2, if lengths are about normal."""
        return ((self.response_tokens_p95 - self.response_tokens) / _NORMAL_95) ** 2

    @property
    def longest_tokens(self) -> float:
        """Tokens of the response that generation waits for."""
        return self.response_tokens_p95 if self.response_tokens_longest is None else self.response_tokens_longest

    @property
    def minibatch_samples(self) -> int:
        """Samples of the largest minibatch."""
        return -(-self.samples // self.minibatches)

    @property
    def smallest_minibatch_samples(self) -> int:
        return self.samples // self.minibatches

    def causal_pairs(self, window: int | None = None) -> float:
        """Return the mean number of (query, key) pairs of a whole sample, with a sliding window if there is one."""
        mean = self.sequence_tokens
        if window is not None and window < mean:
            return mean * window - window**2 / 2
        return (mean**2 + self.response_variance) / 2

    def memory_workload(
        self, response_tokens: float | None = None, *, accelerator: bool = True, drawn: bool = False
    ) -> Workload:
        """Return the workload that memory is predicted for.

        Args:
            response_tokens: the longest response that must fit; None: the p95 length.
            accelerator: whether devices have memory of their own (`NodeKind.accelerator`).
            drawn: the lengths are those of samples in hand, so no micro-batch holds only the longest. Without the
                length of the longest it changes nothing. What `response_tokens` is above that holds for all samples.
        """
        length = self.response_tokens_p95 if response_tokens is None else response_tokens
        drawn = drawn and self.response_tokens_longest is not None
        mean = self.response_tokens + max(0.0, length - self.longest_tokens)
        return Workload(
            samples_per_step=self.samples,
            minibatches=self.minibatches,
            prompt_tokens=-int(-self.prompt_tokens // 1),
            response_tokens=-int(-length // 1),
            accelerator=accelerator,
            slot_tokens=self.slot_tokens,
            staging_buffer_bytes=self.staging_buffer_bytes,
            mean_response_tokens=math.ceil(mean) if drawn else None,
            response_deviation=math.ceil(math.sqrt(self.response_variance)) if drawn else 0,
        )
