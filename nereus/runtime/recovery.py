"""Bringing live workers to rest after a failed command: nothing under way, no abort flag set, all of them answering."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

from nereus.runtime.watcher import Watcher

# A message to a worker may find its stream taken by a large one, so it is sent again.
_RESEND_S = 0.5


def end_commands(watcher: Watcher, timeout_s: float) -> None:
    """Abort all commands under way and return when none is left; workers that take longer are killed.

    Commands beside the others go on.
    """
    deadline = time.monotonic() + timeout_s
    while busy := [worker for worker in watcher.live() if watcher.commands_of(worker)]:
        for worker in busy:
            if time.monotonic() > deadline:
                watcher.kill(worker, f"its command did not end within {timeout_s:g} s after it was aborted")
            else:
                worker.stream.try_send(("abort",))
        wait([future for worker in busy for future in watcher.commands_of(worker)], _RESEND_S)


def clear_aborts(watcher: Watcher, numbers: Iterator[int], timeout_s: float) -> None:
    """Clear the abort flag of all live workers, none of which has a command; who doesn't answer in time is killed."""
    deadline = time.monotonic() + timeout_s
    missing = watcher.live()
    while missing and time.monotonic() < deadline:
        answers: dict[int, Future] = {}
        for worker in missing:
            answer = answers[worker.device] = Future()
            number = next(numbers)
            stream = watcher.expect(worker.device, number, answer, beside=True)
            if stream is not None:
                stream.try_send(("clear", number))
        left_s = max(0.0, deadline - time.monotonic())
        wait(answers.values(), min(_RESEND_S, left_s))
        missing = [worker for worker in missing if not answers[worker.device].done()]
    for worker in missing:
        watcher.kill(worker, f"silent for {timeout_s:g} s")
