"""The parts of a run config about a world that changes: which devices there are by step, and what is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from nereus.config.parts import Part

ADAPTS = True  # what `adapt.enabled` is where a config says nothing of it
_TRACE = "[[0, 4], [6, 2]]"


class DeviceFile(Part):
    """Devices from a file: a CSV `seconds,available`, or the JSON of github.com/skypilot-org/spot-traces."""

    file: str = Field(..., description="Path, or a name in the folder that NEREUS_TRACES names.")
    scale: float = Field(1.0, gt=0, description="Devices for each available instance.")
    min: int = Field(0, ge=0, description="Fewest devices.")
    max: int | None = Field(None, gt=0, description="Most devices.")
    span_s: float | None = Field(None, gt=0, description="Seconds of the trace that the steps span; empty: all.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}; swap them")
        return self


def check_devices_form(devices: Any) -> Any:
    """Return what `drift.devices` says as it is; an empty text, as forms hand it over, as None.

    Raises:
        ValueError: it is neither a list of [step, devices] by ascending steps from 0 on, nor a file.
    """
    if isinstance(devices, list | tuple):
        if not devices:
            raise ValueError(f"the list is empty; leave it out, or write it like {_TRACE}")
        before = -1
        for entry in devices:
            step = _entry_step(entry)
            if before < 0 < step:
                raise ValueError(f"the list begins at step {step}; its first entry must hold from step 0 on")
            if step <= before:
                raise ValueError(f"the list names step {step} after step {before}; let its steps ascend")
            before = step
        if not any(count for _, count in devices):
            raise ValueError("the list has 0 devices for ever; let there be some at some step")
    elif devices is not None and not isinstance(devices, str | Mapping | DeviceFile):
        raise ValueError(f"{devices!r} is no trace; write a list like {_TRACE}, or the path of a file")
    return None if devices == "" else devices


def _entry_step(entry: Any) -> int:
    if isinstance(entry, list | tuple) and len(entry) == 3 and entry[2] == "lost":
        raise ValueError(
            f"the entry {list(entry)} is for the simulator; a trace of a run gives notice, so write [step, devices]"
        )
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise ValueError(f"the entry {entry!r} of the list is no pair [step, devices]; write it like {_TRACE}")
    for what, value in zip(("step", "number of devices"), entry, strict=True):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"the entry {list(entry)} has the {what} {value!r}; it is a whole number from 0 on")
    return entry[0]


DeviceTrace = tuple[tuple[int, int], ...]


class DriftConfig(Part):
    """What is known beforehand of a world that changes."""

    devices: Annotated[DeviceTrace | DeviceFile | str | None, BeforeValidator(check_devices_form)] = Field(
        None,
        description="[[step, n], ...]: device ids 0..n-1 are there from that step on, announced in time; or a file. At "
        "0 devices the run ends, to be resumed. Empty: all of cluster.devices, always.",
    )

    def most_devices(self) -> tuple[int, int] | None:
        """Return the entry of a list that has most devices, as (step, devices); None where there is no list."""
        if not isinstance(self.devices, tuple):
            return None
        return max(self.devices, key=lambda entry: entry[1])


class AdaptConfig(Part):
    """Whether and when the plan of a running job is changed."""

    enabled: bool = Field(
        ADAPTS,
        description="Let the controller change the plan between steps; false, or with a "
        "schedule of plans: it stays as it is given.",
    )
    policy: Literal["payback", "any_gain", "every_k", "fixed"] = Field(
        "payback",
        description="When a faster plan is taken: `payback` when the change pays back soon enough, `any_gain` always, "
        "`every_k` every `every` steps, `fixed` never: only dp follows the devices.",
    )
    gamma: float = Field(
        0.5, ge=0, le=1, description="`payback`: share of the steps until the next drift within which a change must "
        "pay back; 0: only changes without which the run can't go on.",
    )  # fmt: skip
    delta_length: float = Field(
        0.3, gt=0, description="Relative change of the mean response length that makes the controller plan anew."
    )
    every: int = Field(3, gt=0, description="`every_k`: steps from one change to the next.")
