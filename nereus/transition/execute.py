"""Runs a graph: each primitive is handed out once, with what it waits for; to threads, virtual time or Prefect.

Nothing here waits for memory: the edges of the graph have settled who has it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeVar

from nereus.transition.primitives import Primitive, TransitionGraph

R = TypeVar("R", covariant=True)


class Outcome(Protocol[R]):
    """What `submit` gives for a primitive: a future of any kind."""

    def result(self) -> R:
        """Wait, then return what the primitive came to, or raise what it raised."""
        ...


class Skipped(RuntimeError):
    """A primitive didn't run, because one that it waits for failed."""


def execute(
    graph: TransitionGraph,
    submit: Callable[[Primitive, Sequence[Any]], Outcome[R]],
    *,
    after_commit: bool = False,
) -> dict[str, R]:
    """Run the primitives before the commit, or those after it; return what each came to, by id.

    Args:
        submit: starts a primitive as soon as all of the given outcomes are there, and returns at once. Those that are
            ready may run at the same time. `streams` of a primitive were handed out before it.
        after_commit: free what was kept of the old plan; only after the commit record is written.

    Raises:
        Exception: the first failure in the graph's order, once nothing runs any more.
    """
    outcomes: dict[str, Outcome[R]] = {}
    for primitive in graph.primitives:
        if primitive.after_commit == after_commit:
            wait_for = [outcomes[id] for id in primitive.depends_on if id in outcomes]
            outcomes[primitive.id] = submit(primitive, wait_for)
    results: dict[str, R] = {}
    failure: BaseException | None = None
    for id, outcome in outcomes.items():
        try:
            results[id] = outcome.result()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return results


def on_threads(pool: Executor, run: Callable[[Primitive], R]) -> Callable[[Primitive, Sequence[Future[R]]], Future[R]]:
    """Return a `submit` that runs primitives on a pool; one that waits takes up no thread."""

    def submit(primitive: Primitive, wait_for: Sequence[Future[R]]) -> Future[R]:
        done: Future[R] = Future()
        lock, left = threading.Lock(), [len(wait_for)]

        def one_ended(_: Future[R] | None) -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] <= 0
            if not is_last:
                return
            if any(future.exception() is not None for future in wait_for):
                done.set_exception(Skipped(f"{primitive.id} didn't run: what it waits for failed"))
                return
            try:
                pool.submit(_run_into, done, run, primitive)
            except RuntimeError as error:  # the pool takes no more; nobody must wait for what will not run
                done.set_exception(error)

        for future in wait_for:
            future.add_done_callback(one_ended)
        if not wait_for:
            one_ended(None)
        return done

    return submit


class Clock(Protocol):
    """Virtual time: `nereus.simulator.clock.Clock` is one."""

    now: float

    def after(self, seconds: float, action: Callable[[], None]) -> None: ...

    def run(self) -> None: ...


class Timed:
    """A primitive in virtual time; `result` is when it ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._then: list[Callable[[], None]] = []
        self._end: float | None = None

    def finish(self) -> None:
        self._end = self._clock.now
        for action in self._then:
            action()

    def when_done(self, action: Callable[[], None]) -> None:
        if self._end is None:
            self._then.append(action)
        else:
            action()

    def result(self) -> float:
        if self._end is None:
            self._clock.run()
        assert self._end is not None, "virtual time has run out"
        return self._end


def on_clock(
    clock: Clock, seconds: Callable[[Primitive], float], started: Callable[[Primitive], None] | None = None
) -> Callable[[Primitive, Sequence[Timed]], Timed]:
    """Return a `submit` that takes up virtual time.

    Args:
        seconds: what a primitive takes.
        started: told of each primitive when it starts.
    """

    def submit(primitive: Primitive, wait_for: Sequence[Timed]) -> Timed:
        timed, left = Timed(clock), [len(wait_for) or 1]

        def one_ended() -> None:
            left[0] -= 1
            if not left[0]:
                if started is not None:
                    started(primitive)
                clock.after(seconds(primitive), timed.finish)

        for other in wait_for:
            other.when_done(one_ended)
        if not wait_for:
            one_ended()
        return timed

    return submit


def _run_into(done: Future[R], run: Callable[[Primitive], R], primitive: Primitive) -> None:
    try:
        result = run(primitive)
    except BaseException as error:  # a future carries all of them to whoever asks for its result
        done.set_exception(error)
    else:
        done.set_result(result)
