"""Devices that are slower than the others: by how much, from the times of equal work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

# A device's factor is the median of so many last ratios, so one disturbed measurement changes nothing.
_KEPT = 5
# Ratios this close to 1 are noise.
_NOISE = 0.05


class DeviceFactors:
    """How many times longer each device takes than the median one; 1 for those within the noise."""

    def __init__(self, factors: Mapping[int, float] | None = None) -> None:
        self._ratios: dict[int, list[float]] = {device: [factor] for device, factor in (factors or {}).items()}

    def observe(self, seconds: Mapping[int, float]) -> None:
        """Take in what equal work took on each of some devices; fewer than three devices have no meaningful median."""
        if len(seconds) < 3:
            return
        typical = median(seconds.values())
        if typical <= 0:
            return
        for device, duration in seconds.items():
            self._ratios[device] = [*self._ratios.get(device, []), duration / typical][-_KEPT:]

    def forget(self, device: int) -> None:
        """Drop what is known of a device, as when another takes its place."""
        self._ratios.pop(device, None)

    def factors(self) -> dict[int, float]:
        """Return the factors of devices that differ from the others."""
        found = {device: median(ratios) for device, ratios in sorted(self._ratios.items())}
        return {device: factor for device, factor in found.items() if abs(factor - 1.0) > _NOISE}

    def slowdown(self, devices: Iterable[int]) -> float:
        """Return the factor of the slowest of some devices."""
        factors = self.factors()
        return max((factors.get(device, 1.0) for device in devices), default=1.0)

    def to_record(self) -> dict[str, Any]:
        return {str(device): ratios for device, ratios in self._ratios.items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DeviceFactors:
        self = cls()
        self._ratios = {int(device): list(ratios) for device, ratios in record.items()}
        return self
