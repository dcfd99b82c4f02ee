"""The tasks that keep a job on a good plan: the decision before a step, and what follows a step that was broken off."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from nereus.progress import Event, publish
from nereus.runtime.session import find_session
from tasks.artifacts import publish_decisions

Record = dict[str, Any]


@task(name="decide", task_run_name="decide-{step}", cache_policy=NO_CACHE, persist_result=False)
def decide(run_id: str, step: int) -> Record | None:
    """Look at devices, lengths, memory and speed, choose the plan for a step, and return the decision if there was one.

    It fails where the run can't go on with the devices there are.
    """
    session = find_session(run_id)
    decision = session.decide(step)
    if decision is not None:
        publish(Event("decision", run_id, step, decision))
        publish_decisions(session.read_decisions(), session.read_transitions())
    return decision


@task(name="make_ready", task_run_name="make_ready-{step}", cache_policy=NO_CACHE, persist_result=False)
def make_ready(run_id: str, step: int, error: Exception) -> Record:
    """Make ready to do a step again that was broken off, or fail as the step did."""
    publish(Event("stage", run_id, step, {"stage": "recovery"}))
    return find_session(run_id).make_ready(step, error)
