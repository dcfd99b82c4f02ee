"""Which devices a job has at each boundary: by its trace, by what people say while it runs, and by what befell it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass(frozen=True)
class Controls:
    """What people have told a job, as of its newest control file.

    Attributes:
        number: of that file; 0 where there is none.
        scale: device ids 0..scale-1 are there, as the newest `scale` said; None where nobody ever said so.
        scale_number: of the file in which it was said.
        drains: device -> epoch seconds when it goes, None where nobody knows; not those that a later `scale` covers.
    """

    number: int = 0
    scale: int | None = None
    scale_number: int = 0
    drains: Mapping[int, float | None] = field(default_factory=dict)


def describe_deadline(deadline: float | None) -> str:
    """Return when a device goes, to be put behind what is said of it; "" where that isn't known."""
    return "" if deadline is None else f", which goes at {datetime.fromtimestamp(deadline, UTC):%H:%M:%S} UTC"


@dataclass(frozen=True)
class Supply:
    """The devices of a job from one boundary on.

    Attributes:
        present: ids that a plan may use; none: the job ends here.
        leaving: the other ones whose memory can still be read, with the epoch seconds until which (None: not known).
            Among them are those that hold nothing.
        reason: why it is these, in words, without a full stop.
    """

    present: tuple[int, ...]
    leaving: Mapping[int, float | None]
    reason: str


@dataclass
class DeviceSupply:
    """The devices 0..total-1 of a job over its steps.

    How many there are is said by the trace and by `scale`; whichever spoke last holds. A drained device is away until a
    later `scale` covers it, one that was noticed or put into quarantine while that lasts.

    Attributes:
        total: devices of the cluster.
        trace: [step, devices] by ascending steps from 0 on; empty: all of them, always.
    """

    total: int
    trace: Sequence[tuple[int, int]] = ()
    _scale: int | None = None  # the one that was read last, with its number and the boundary where it was read
    _scale_number: int = 0
    _scale_step: int = 0
    _passed: tuple[int, ...] = ()  # steps at which the run went on although the trace had 0 devices

    def __post_init__(self) -> None:
        for step in self._passed:
            self.trace = _pass_end(self.trace, step, self.total)

    def at(
        self,
        step: int,
        controls: Controls | None = None,
        *,
        noticed: Collection[int] = (),
        quarantined: Collection[int] = (),
    ) -> Supply:
        """Return the devices from the boundary before a step on. The same question has the same answer again.

        Args:
            step: that is about to begin.
            controls: what people have said; None: nothing.
            noticed: devices whose worker was told that it will have to end.
            quarantined: devices that died too often; what they held is gone.
        """
        controls = controls or Controls()
        self._hear(step, controls)
        count, why = self._count(step)
        reasons = [why] if why else []
        away: dict[int, float | None] = dict.fromkeys(range(count, self.total))
        away |= dict.fromkeys(_known(noticed, self.total))
        away |= {device: controls.drains[device] for device in _known(controls.drains, self.total)}
        for device in _known(controls.drains, count):
            reasons.append(f"device {device} is drained{describe_deadline(controls.drains[device])}")
        for device in _known(set(noticed) - set(controls.drains), count):
            reasons.append(f"device {device} was given notice by SIGTERM")
        for device in _known(quarantined, count):
            reasons.append(f"device {device} died too often")
        present = tuple(device for device in range(count) if device not in away and device not in quarantined)
        if not present and (controls.drains or noticed):
            reasons.append("`nereus scale` brings drained devices back")
        leaving = {device: away[device] for device in sorted(away) if device not in quarantined}
        return Supply(present, leaving, _describe(len(present), self.total, reasons))

    def begin_again(self, step: int, controls: Controls | None = None) -> None:
        """Let a run go on at a step: the 0 devices that ended it, by the trace or by a `scale`, are over.

        Of the trace its next entry holds then, without one all devices. To be called before `at`.
        """
        self._hear(step, controls or Controls())
        if self._count(step)[0] > 0:
            return
        if self._scale == 0:
            self._scale = None
        if self._count(step)[0] == 0:
            self._passed += (step,)
            self.trace = _pass_end(self.trace, step, self.total)

    def to_record(self) -> dict[str, Any]:
        """Return what has been heard and passed so far as plain values, for staged state."""
        return {
            "scale": self._scale,
            "scale_number": self._scale_number,
            "scale_step": self._scale_step,
            "passed": list(self._passed),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], total: int, trace: Sequence[tuple[int, int]] = ()) -> DeviceSupply:
        """Return the supply of a run that goes on; devices and trace are those of now."""
        return cls(
            total, trace, record["scale"], record["scale_number"], record["scale_step"], tuple(record["passed"])
        )  # fmt: skip

    def _hear(self, step: int, controls: Controls) -> None:
        if controls.scale_number > self._scale_number:
            self._scale, self._scale_number, self._scale_step = controls.scale, controls.scale_number, step

    def _count(self, step: int) -> tuple[int, str]:
        """Return how many devices there are by trace and `scale`, and who says so; "" where nobody does."""
        since, count = max((entry for entry in self.trace if entry[0] <= step), default=(-1, self.total))
        if self._scale is not None and since <= self._scale_step:
            return min(self._scale, self.total), f"`nereus scale` said {self._scale} at step {self._scale_step}"
        return min(count, self.total), f"the trace has {count} from step {since} on" if since >= 0 else ""


def _pass_end(trace: Sequence[tuple[int, int]], step: int, total: int) -> Sequence[tuple[int, int]]:
    """Return a trace whose 0 devices at a step are over: from then on its next entry holds, without one `total`."""
    before = [entry for entry in trace if entry[0] <= step]
    if not before or before[-1][1] > 0:
        return trace
    after = list(itertools.dropwhile(lambda entry: entry[1] == 0, trace[len(before) :]))
    return [*before[:-1], (step, after[0][1] if after else total), *after[1:]]


def _known(devices: Collection[int], count: int) -> list[int]:
    """Return those of some device ids that are below `count`, in order."""
    return sorted(device for device in devices if 0 <= device < count)


def _describe(num_present: int, total: int, reasons: Sequence[str]) -> str:
    share = f"{num_present} of {total} devices" if num_present < total else f"all {total} devices"
    return f"{share}: {'; '.join(reasons)}" if reasons else share
