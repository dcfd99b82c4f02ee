"""What a running job tells whoever watches it in the same process: a view, never the record of the run.

The flow publishes; the terminal of `nereus run` subscribes. Nobody listening costs nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Event:
    """One thing that happened in a run.

    `opened`: workers are up; data = {"run_dir", "steps", "first_step", "plan"}, `steps` being those still to do.
    `stage`: a stage of a step began; data = {"stage"}. `step`: a step ended; data = its line of metrics.jsonl.
    `decision`: a plan was weighed before a step; data = its line of decisions.jsonl.
    `transition`: a change of the plan before a step ended; data = its line of transitions.jsonl.
    Example: Event("stage", "amber-fox", 3, {"stage": "generation"}).
    """

    kind: Literal["opened", "stage", "step", "decision", "transition"]
    run_id: str
    step: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


Listener = Callable[[Event], None]

_listeners: list[Listener] = []


@contextmanager
def watch(listener: Listener) -> Iterator[None]:
    """Call `listener` with every event published in this process while the context is open."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def publish(event: Event) -> None:
    """Hand an event to all listeners, in the calling thread."""
    for listener in tuple(_listeners):
        listener(event)
