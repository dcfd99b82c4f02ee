"""The change of the plan between two steps, as one task with a task for each primitive inside.

Prefect shows what waits for what, how many bytes each primitive moves, and, once it has ended, its seconds.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext

from nereus.progress import Event, publish
from nereus.runtime.session import find_session
from nereus.runtime.transition import Submit
from nereus.transition.execute import on_threads
from nereus.transition.memory import format_bytes
from nereus.transition.mermaid import MOST_BOXES
from nereus.transition.primitives import Primitive, TransitionGraph
from tasks.artifacts import publish_transition

Record = dict[str, Any]
# Prefect types `wait_for` only together with `return_state`, hence the ignores below.
_THREADS = 8


@task(name="transition", task_run_name="transition-{step}", cache_policy=NO_CACHE, persist_result=False)
def transition(run_id: str, step: int) -> Record:
    """Carry the job to the plan that is due at a step, or back, and return how that ended."""
    publish(Event("stage", run_id, step, {"stage": "transition"}))
    session = find_session(run_id)
    move = session.begin_transition(step)
    publish_transition(step, move.graph, move.predicted_s)
    with choose_submit(run_id, move.graph) as submit:
        line = session.run_transition(submit)
    publish_transition(step, move.graph, {part["id"]: part["seconds"] for part in line["primitives"]}, line)
    publish(Event("transition", run_id, step, line))
    return {key: line[key] for key in ("step", "outcome", "seconds", "bytes")}


@task(name="run_primitive", cache_policy=NO_CACHE, persist_result=False)
def run_primitive(run_id: str, id: str) -> Record:
    """Run one primitive of the transition under way; return {"bytes", "seconds"}."""
    record = find_session(run_id).find_transition().run_primitive(id)
    _rename(f"{record['seconds']:.2f} s")
    return record


@contextmanager
def choose_submit(run_id: str, graph: TransitionGraph) -> Iterator[Submit]:
    """Yield what starts the primitives of a graph: as a task each, or, of a large graph, with a task for each group.

    A primitive that waits takes up a thread of the flow's task runner. They are handed out in an order in which each
    only waits for earlier ones, so the first that hasn't ended always runs.
    """
    if len(graph.primitives) > MOST_BOXES:
        pool = ThreadPoolExecutor(_THREADS, "nereus-primitives")
        try:
            yield Groups(run_id, graph, pool).submit
        finally:
            pool.shutdown(wait=False)  # after a signal what runs ends with the session, which is closed after this
        return

    def submit(primitive: Primitive, wait_for: Sequence[Any]) -> Any:
        named = run_primitive.with_options(task_run_name=describe([primitive]))
        return named.submit(run_id, primitive.id, wait_for=list(wait_for))  # type: ignore[call-overload]

    yield submit


class Groups:
    """Runs primitives on threads; a task stands for those of one model-stage and kind, from the last one's start on.

    They can't be run by that task itself: two groups may wait for parts of each other.
    """

    def __init__(self, run_id: str, graph: TransitionGraph, pool: Executor) -> None:
        move = find_session(run_id).find_transition
        self._start = on_threads(pool, lambda primitive: move().run_primitive(primitive.id))
        self._group_of: dict[str, list[Primitive]] = {}
        groups: dict[tuple[str, str, bool], list[Primitive]] = {}
        for primitive in graph.primitives:
            key = (primitive.model_stage, primitive.kind, primitive.after_commit)
            self._group_of[primitive.id] = groups.setdefault(key, [])
            groups[key].append(primitive)
        self._started: dict[str, Future[Record]] = {}
        self._tasks: dict[str, Any] = {}  # of the groups that are shown, by the id of each of their primitives

    def submit(self, primitive: Primitive, wait_for: Sequence[Future[Record]]) -> Future[Record]:
        """Start a primitive, and show its group if that was the last of it."""
        outcome = self._started[primitive.id] = self._start(primitive, wait_for)
        group = self._group_of.get(primitive.id, [primitive])  # one that leads back stands alone
        if all(part.id in self._started for part in group):
            self._show(group)
        return outcome

    def _show(self, group: Sequence[Primitive]) -> None:
        outcomes = [self._started[part.id] for part in group]

        @task(task_run_name=describe(group), cache_policy=NO_CACHE, persist_result=False)
        def run_primitives() -> Record:
            records = [outcome.result() for outcome in outcomes]
            _rename(f"{max(record['seconds'] for record in records):.2f} s at most")
            return {"bytes": sum(record["bytes"] for record in records)}

        waits_for = {id: self._tasks[id] for part in group for id in part.depends_on if id in self._tasks}
        earlier = list(dict.fromkeys(waits_for.values()))
        future = run_primitives.submit(wait_for=earlier)  # type: ignore[call-overload]
        self._tasks.update(dict.fromkeys((part.id for part in group), future))


def describe(group: Sequence[Primitive]) -> str:
    """Return a task run's name, such as `actor.training reshard, 12.30 MiB direct`."""
    first = group[0]
    many = f"{len(group)} x " if len(group) > 1 else ""
    num_bytes = sum(part.bytes for part in group)
    transports = dict.fromkeys(part.transport for part in group if part.bytes)
    moved = f", {format_bytes(num_bytes)} {' and '.join(transports)}" if num_bytes else ""
    return f"{first.model_stage} {many}{first.kind}{moved}"


def _rename(measured: str) -> None:
    """Add what was measured to the name of the task run that is about to end: its last state carries the name along."""
    context = TaskRunContext.get()
    if context is not None:
        context.task_run.name = f"{context.task_run.name}, {measured}"
