"""One step as events: tasks start when their devices are free, memory is checked as they start, devices may vanish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nereus.cost.step import makespan
from nereus.plan import Plan
from nereus.simulator.clock import Clock

PHASES = ("generation", "inference", "training")


@dataclass(frozen=True)
class Loss:
    """Devices that vanish `after_s` seconds into a step."""

    devices: frozenset[int]
    after_s: float


@dataclass
class StepRun:
    """What became of a step: its seconds, and when each task ended; `broken_by` names what broke it off."""

    seconds: float = 0.0
    ended_s: dict[str, float] = field(default_factory=dict)
    broken_by: str | None = None
    devices: tuple[int, ...] = ()
    was_training: bool = False


class StepSimulation:
    """The events of one step of a plan."""

    def __init__(
        self,
        clock: Clock,
        plan: Plan,
        seconds: Mapping[str, float],
        *,
        overfull: Callable[[str], Sequence[int]] = lambda _: (),
        loss: Loss | None = None,
    ) -> None:
        """Args:
        seconds: by task: "actor.training/inference" and the like, "weight_sync" and "staging" (a write, mostly hidden).
        overfull: says of a task's key on which devices it runs out of memory.
        """
        self._clock, self._plan, self._seconds = clock, plan, seconds
        self._overfull, self._loss = overfull, loss
        self._began = clock.now
        self._waiting: dict[str, set[str]] = {}
        self._hidden_until = 0.0
        self.run_record = StepRun()

    def run(self) -> StepRun:
        """Let the step happen in virtual time and return what became of it."""
        if self._loss is not None:
            self._clock.after(self._loss.after_s, self._lose)
        self._begin_phase(0)
        self._clock.run()
        return self.run_record

    def _tasks(self, phase: str) -> list[str]:
        return [name for name in self._plan if f"{name}/{phase}" in self._seconds]

    def _begin_phase(self, index: int) -> None:
        if index == len(PHASES):
            self._end()
            return
        phase = PHASES[index]
        if phase == "training":
            self._hidden_until = self._clock.now - self._began
            self.run_record.was_training = True
        # A model-stage waits for those before it, in the plan's order, that share a device with it.
        names, devices = self._tasks(phase), {name: set(self._plan[name].devices) for name in self._plan}
        self._waiting = {
            name: {other for other in names[:place] if devices[other] & devices[name]}
            for place, name in enumerate(names)
        }
        if not names:
            self._begin_phase(index + 1)
        for name in names:
            if not self._waiting[name]:
                self._begin_task(index, name)

    def _begin_task(self, index: int, name: str) -> None:
        key = f"{name}/{PHASES[index]}"
        overfull = tuple(self._overfull(key))
        if overfull:
            self._break_off(f"out of memory in {key}", overfull)
            return
        self._clock.after(self._seconds[key], lambda: self._end_task(index, name, key))

    def _end_task(self, index: int, name: str, key: str) -> None:
        self.run_record.ended_s[key] = self._clock.now - self._began
        del self._waiting[name]
        for other, needs in self._waiting.items():
            if name in needs:
                needs.remove(name)
                if not needs and self.run_record.broken_by is None:
                    self._begin_task(index, other)
        if not self._waiting and self.run_record.broken_by is None:
            self._begin_phase(index + 1)

    def _end(self) -> None:
        pause = max(0.0, self._seconds.get("staging", 0.0) - self._hidden_until)
        self._clock.after(self._seconds.get("weight_sync", 0.0) + pause, self._finish)

    def _finish(self) -> None:
        self.run_record.seconds = self._clock.now - self._began
        self._clock.clear()

    def _lose(self) -> None:
        assert self._loss is not None
        if self._loss.devices & set(self._plan.devices):
            self._break_off("lost devices", tuple(sorted(self._loss.devices)))

    def _break_off(self, reason: str, devices: tuple[int, ...]) -> None:
        self.run_record.broken_by, self.run_record.devices = reason, devices
        self.run_record.seconds = self._clock.now - self._began
        self._clock.clear()


def step_latency(plan: Plan, seconds: Mapping[str, float]) -> float:
    """Return the seconds of a step from those of its tasks: what the events come to when nothing breaks it off."""
    stages = []
    for phase in PHASES:
        running = [name for name in plan if f"{name}/{phase}" in seconds]
        devices = [plan[name].devices for name in running]
        stages.append(makespan(devices, [seconds[f"{name}/{phase}"] for name in running]))
    pause = max(0.0, seconds.get("staging", 0.0) - stages[0] - stages[1])
    return sum(stages) + seconds.get("weight_sync", 0.0) + pause
