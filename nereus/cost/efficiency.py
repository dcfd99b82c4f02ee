"""What share of the nominal peaks the hardware reaches, by operation class: guesses and published figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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

    `host_s` is what the host adds to a micro-batch or a decoding pass. `device_factor` says of devices that aren't
    like the others how many times longer they take (2.0: half as fast); devices it doesn't name have 1.
    """

    efficiency: Mapping[str, float] = field(hash=False)
    latency_s: Mapping[str, float] = field(hash=False)
    host_s: float
    device_factor: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    def __post_init__(self) -> None:
        for what, numbers in (("efficiency", self.efficiency), ("latency_s", self.latency_s)):
            unknown, missing = sorted(set(numbers) - set(CLASSES)), sorted(set(CLASSES) - set(numbers))
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
        return Efficiencies({**self.efficiency, **changes}, self.latency_s, self.host_s, self.device_factor)

    def to_record(self) -> dict[str, Any]:
        return {
            "efficiency": dict(self.efficiency),
            "latency_s": dict(self.latency_s),
            "host_s": self.host_s,
            "device_factor": {str(device): factor for device, factor in self.device_factor.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Efficiencies:
        factors = {int(device): factor for device, factor in record["device_factor"].items()}
        return cls(record["efficiency"], record["latency_s"], record["host_s"], factors)


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
