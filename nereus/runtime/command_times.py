"""What commands take inside the workers: each reply carries its seconds, and those of communicators by operation class.

worker: Communicator -> Spending, read after each command -> CommandTimes in the reply -> driver: StepTimes, one a step
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

# By the workers' method: the phase of a task such as "actor.training/inference".
_PHASES = {
    "generate": "generation",
    "infer_logprobs": "inference",
    "infer_values": "inference",
    "infer_scores": "inference",
    "train": "training",
}
_WEIGHT_SYNC = "sync_weights"


@dataclass(frozen=True)
class CommandTimes:
    """What one worker spent on one command.

    Attributes:
        seconds: that its method ran.
        classes_s: of them, those inside communicators by operation class, waits for peers included.
        classes_bytes: bytes of the tensors that it gave to these communicators.
    """

    seconds: float
    classes_s: Mapping[str, float] = field(default_factory=dict)
    classes_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def own_s(self) -> float:
        """Seconds outside of communicators."""
        return max(0.0, self.seconds - sum(self.classes_s.values()))


class Spending:
    """Seconds and bytes of a worker's communicators by operation class; of the thread that runs commands alone."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._bytes: dict[str, int] = {}

    def add(self, name: str, seconds: float, num_bytes: int) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._bytes[name] = self._bytes.get(name, 0) + num_bytes

    def take(self, seconds: float) -> CommandTimes:
        """Return what a command that ran for some seconds has spent, and start anew."""
        times = CommandTimes(seconds, self._seconds, self._bytes)
        self._seconds, self._bytes = {}, {}
        return times


class StepTimes:
    """The commands of one step, by task and device; tasks may be noted by several threads.

    A task is keyed as in `nereus.cost.step.step_operations`: "actor.generation/generation", "actor.training/inference",
    ..., "weight_sync". Commands that belong to no task are passed over.
    """

    def __init__(self) -> None:
        self._times: dict[str, dict[int, CommandTimes]] = {}
        self._tokens: dict[str, dict[int, int]] = {}
        self._lock = threading.Lock()

    def note(self, label: str, method: str, times: Mapping[int, CommandTimes]) -> None:
        """Take in what a command has taken on its devices; repeated in a step, it adds up.

        Args:
            label: the model-stage.
            method: of the workers' service.
        """
        key = task_key(label, method)
        if key is None:
            return
        with self._lock:
            known = self._times.setdefault(key, {})
            for device, one in times.items():
                known[device] = _sum(known[device], one) if device in known else one

    def note_tokens(self, task: str, tokens: Mapping[int, int]) -> None:
        """Take in how many tokens each device works on in a task."""
        with self._lock:
            self._tokens[task] = dict(tokens)

    def of_task(self, task: str) -> dict[int, CommandTimes]:
        """Return by device what a task has taken."""
        with self._lock:
            return dict(self._times.get(task, {}))

    def tokens_of(self, task: str) -> dict[int, int]:
        """Return by device the tokens of a task; empty where nobody has said."""
        with self._lock:
            return dict(self._tokens.get(task, {}))

    def tasks(self) -> tuple[str, ...]:
        """Return the tasks that have run, sorted."""
        with self._lock:
            return tuple(sorted(self._times))

    def tasks_s(self) -> dict[str, float]:
        """Return the seconds of each task on its slowest device."""
        return {task: max(one.seconds for one in self.of_task(task).values()) for task in self.tasks()}

    def classes_s(self) -> dict[str, dict[str, float]]:
        """Return by task the seconds of each class of communication, on the device that waited least for its peers.

        That is the one with most work of its own: what the others spend beyond it is no communication, but a wait.
        """
        result = {}
        for task in self.tasks():
            busiest = max(self.of_task(task).values(), key=lambda one: one.own_s)
            if busiest.classes_s:
                result[task] = dict(busiest.classes_s)
        return result


def task_key(label: str, method: str) -> str | None:
    """Return the task that a command is, or None."""
    if method == _WEIGHT_SYNC:
        return "weight_sync"
    return f"{label}/{_PHASES[method]}" if method in _PHASES else None


def _sum(one: CommandTimes, other: CommandTimes) -> CommandTimes:
    names = {**one.classes_s, **other.classes_s}
    return CommandTimes(
        one.seconds + other.seconds,
        {name: one.classes_s.get(name, 0.0) + other.classes_s.get(name, 0.0) for name in names},
        {name: one.classes_bytes.get(name, 0) + other.classes_bytes.get(name, 0) for name in names},
    )
