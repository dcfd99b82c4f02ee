"""What share of the nominal peaks the hardware reaches, by operation class: guesses and published figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

CLASSES = (
    "gemm",
    "attention",
    "decode",
    "all_reduce",
    "p2p",
    "all_gather",
    "dp_sync",
    "weight_sync",
    "storage_write",
    "storage_read",
    "comm_setup",
)


@dataclass(frozen=True)
class Efficiencies:
    """Share of the peak by class (0 to 1), latency of one operation by class, and overheads.

    `host_s` is what the host adds to a micro-batch or a decoding pass (on a CPU: to a command or an update).
    `device_factor` says of devices that aren't like the others how many times longer they take (2.0: half as fast);
    devices it doesn't name have 1. `step_s` are seconds of a step in which no device works.
    """

    efficiency: Mapping[str, float] = field(hash=False)
    latency_s: Mapping[str, float] = field(hash=False)
    host_s: float
    device_factor: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    step_s: float = 0.0

    def __post_init__(self) -> None:
        for what, numbers in (("efficiency", self.efficiency), ("latency_s", self.latency_s)):
            unknown = [name for name in numbers if name not in CLASSES]
            missing = [name for name in CLASSES if name not in numbers]
            if unknown:
                raise ValueError(f"{what} names {unknown[0]!r}, which is no class; they are {', '.join(CLASSES)}.")
            if missing:
                raise ValueError(f"{what} leaves out {missing[0]!r}; name all of {', '.join(CLASSES)}.")
        for name, share in self.efficiency.items():
            if not share > 0:
                raise ValueError(f"efficiency of {name} is {share}; it must be above 0.")

    def slowdown(self, devices: Iterable[int]) -> float:
        """Return the factor of the slowest of some devices."""
        if not self.device_factor:
            return 1.0
        return max((self.device_factor.get(device, 1.0) for device in devices), default=1.0)

    def with_changes(self, **changes: float) -> Efficiencies:
        """Return the same with the efficiency of some classes changed, as in `with_changes(gemm=0.52)`."""
        return replace(self, efficiency={**self.efficiency, **changes})

    def to_record(self) -> dict[str, Any]:
        return {
            "efficiency": dict(self.efficiency),
            "latency_s": dict(self.latency_s),
            "host_s": self.host_s,
            "device_factor": {str(device): factor for device, factor in self.device_factor.items()},
            "step_s": self.step_s,
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Efficiencies:
        factors = {int(device): factor for device, factor in record["device_factor"].items()}
        return cls(record["efficiency"], record["latency_s"], record["host_s"], factors, record["step_s"])


# What the controller starts from: lower than what well-tuned kernels reach, so that a first plan is no disappointment.
CONSERVATIVE = Efficiencies(
    efficiency=MappingProxyType(
        {
            "gemm": 0.45,
            "attention": 0.3,
            "decode": 0.4,
            "all_reduce": 0.4,
            "p2p": 0.4,
            "all_gather": 0.4,
            "dp_sync": 0.4,
            "weight_sync": 0.3,
            "storage_write": 0.5,
            "storage_read": 0.5,
            "comm_setup": 1.0,
        }
    ),
    latency_s=MappingProxyType(
        {
            "gemm": 0.0,
            "attention": 0.0,
            "decode": 0.0,
            "all_reduce": 30e-6,
            "p2p": 30e-6,
            "all_gather": 30e-6,
            "dp_sync": 100e-6,
            "weight_sync": 200e-6,
            "storage_write": 20e-3,
            "storage_read": 20e-3,
            "comm_setup": 0.3,
        }
    ),
    host_s=4e-3,
)

# The same where devices are slots of a CPU: what one small model's step took on two server cores. A message waits for a
# peer that shares the machine with whatever else runs there.
CONSERVATIVE_CPU = Efficiencies(
    efficiency=MappingProxyType({**CONSERVATIVE.efficiency, "gemm": 0.5, "decode": 0.3, "attention": 0.5}),
    latency_s=MappingProxyType(
        {
            **CONSERVATIVE.latency_s,
            "gemm": 200e-6,
            "decode": 300e-6,
            "all_reduce": 100e-6,
            "p2p": 300e-6,
            "all_gather": 100e-6,
            "dp_sync": 500e-6,
            "weight_sync": 1e-3,
            "comm_setup": 20e-3,
        }
    ),
    host_s=6e-3,
)


# A rank waits for peers in each step of theirs, much as for a message.
_LIKE_A_MESSAGE = ("all_reduce", "all_gather")


def first_guess(*, accelerator: bool, message_s: float | None = None) -> Efficiencies:
    """Return what is believed before a step was measured, of accelerators or of slots of a CPU.

    Args:
        message_s: seconds of a small message between two of the devices, where a probe has measured them.
    """
    guess = CONSERVATIVE if accelerator else CONSERVATIVE_CPU
    if message_s is None:
        return guess
    return replace(guess, latency_s={**guess.latency_s, **dict.fromkeys(_LIKE_A_MESSAGE, message_s)})


# What public measurements of single kernels and links on H100 machines reach, for comparison with published step times.
# - gemm: 552, 551, 559 and 591 TFLOP/s for the four bfloat16 products of a LLaMA layer (16,384 tokens), 0.57 of 989 in
#   the mean: github.com/meta-pytorch/float8_experimental/pull/100. 546 to 585 on such shapes in
#   github.com/pytorch/FBGEMM/pull/2546. The fastest of all shapes reaches 794.5 (0.80), which no layer's shapes do:
#   github.com/stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul FLOPS".
# - attention: 424 TFLOP/s backward at 1,024 tokens and head dim 128, the pass with most of the work: FlashAttention-3,
#   arXiv:2407.08608, figure 6.
# - decode: 352.6 TFLOP/s with 128 rows on a weight [12288, 5376], which is 2.75 of 3.35 TB/s:
#   github.com/vllm-project/vllm/pull/49363. Reading keys and values reaches 3.0 TB/s: github.com/deepseek-ai/FlashMLA.
# - all_reduce, all_gather, p2p: 370 GB/s of 450 over NVLink: github.com/NVIDIA/nccl-tests/issues/212, a maintainer.
# - dp_sync: 84.8 GB/s of 100 between nodes in the mean over sizes: github.com/NVIDIA/nccl-tests/issues/119.
# - weight_sync: 212 GB to 8 devices in 3.47 s, 7.6 GB/s each of H800's 200: github.com/MoonshotAI/checkpoint-engine.
# - host: 4 ms between decoding passes: github.com/vllm-project/vllm/issues/6854.
# Latencies and storage are assumed as above: they hardly matter there.
PUBLISHED = Efficiencies(
    efficiency=MappingProxyType(
        {
            **CONSERVATIVE.efficiency,
            "gemm": 0.57,
            "attention": 0.43,
            "decode": 0.82,
            "all_reduce": 0.82,
            "p2p": 0.82,
            "all_gather": 0.82,
            "dp_sync": 0.85,
            "weight_sync": 0.038,
        }
    ),
    latency_s=CONSERVATIVE.latency_s,
    host_s=4e-3,
)
