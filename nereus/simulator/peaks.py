"""Peak memory of every device of a plan, worked out once for each kind of device: thousands hold the same ranks."""

from __future__ import annotations

from collections.abc import Mapping

from nereus.cost.memory import PlanMemory, Precision, Workload
from nereus.model.spec import ModelSpec
from nereus.plan import Plan


class PeakModel:
    """Peaks of plans; devices with the same ranks of the same model-stages have the same peak."""

    def __init__(self, specs: Mapping[str, ModelSpec], precision: Precision) -> None:
        self._specs, self._precision = specs, precision
        self._kinds: tuple[Plan | None, dict[tuple[tuple[str, int], ...], list[int]]] = (None, {})
        self._phases: dict[int, str] = {}

    def peaks(self, plan: Plan, workload: Workload) -> dict[int, int]:
        """Return the predicted peak of every device in bytes."""
        if self._kinds[0] != plan:
            self._kinds = (plan, _kinds_of_devices(plan))
        memory = PlanMemory(plan, self._specs, workload, self._precision)
        peaks: dict[int, int] = {}
        self._phases = {}
        for devices in self._kinds[1].values():
            peak = memory.peak(devices[0])
            peaks |= dict.fromkeys(devices, peak.total)
            self._phases |= dict.fromkeys(devices, peak.phase)
        return peaks

    def phase(self, device: int) -> str:
        """Return the phase of a device's peak under the plan asked for last."""
        return self._phases[device]


def _kinds_of_devices(plan: Plan) -> dict[tuple[tuple[str, int], ...], list[int]]:
    ranks: dict[int, list[tuple[str, int]]] = {}
    for name, stage in plan.items():
        for index, device in enumerate(stage.devices):
            ranks.setdefault(device, []).append((name, index % stage.layout.size))
    kinds: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for device, held in ranks.items():
        kinds.setdefault(tuple(held), []).append(device)
    return kinds
