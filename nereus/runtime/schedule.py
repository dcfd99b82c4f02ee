"""The plans of a run by step, checked at the door: each fits, and so does the move from each to the next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nereus.config import RunConfig
from nereus.cost.memory import check_memory
from nereus.plan import Plan
from nereus.planner import plan_auto, resolve_plan
from nereus.runtime.frame import Frame, first_plan
from nereus.transition.graph import plan_transition
from nereus.transition.memory import TransitionMemory

Schedule = tuple[tuple[int, Plan], ...]


def resolve_schedule(
    config: RunConfig,
    memory: TransitionMemory,
    capacities: Mapping[int, int],
    frame: Frame,
    *,
    first_step: int = 0,
) -> Schedule:
    """Return the run's plans with the step from which each holds; the first one holds from step 0.

    The devices of a later plan come in the rank order in which the move from the plan before it leaves them.

    Args:
        memory: of the run's models on all its devices.
        capacities: bytes of memory by device id.
        frame: what the planner knows, for entries that are `auto`.
        first_step: where the run begins or goes on. What held only before it is dropped where it fits no more.

    Raises:
        ValueError: a plan is illegal or needs more memory than there is, there or on the way to it; the message names
            the step of its entry where there are several.
    """
    entries = config.plan if isinstance(config.plan, tuple) else ((0, config.plan),)
    begin = sum(step <= first_step for step, _ in entries) - 1
    schedule: list[tuple[int, Plan]] = []
    for index, (step, entry) in enumerate(entries):
        try:
            plan = _resolve(entry, config, memory, capacities, frame)
            if schedule and index > begin:
                plan = plan_transition(schedule[-1][1], plan, memory, transport=config.transport).target
            elif schedule:
                plan = _as_it_was(schedule[-1][1], plan, config, memory)
        except ValueError as error:
            if index >= begin:
                raise error if len(entries) == 1 else ValueError(_with_step(str(error), step)) from None
        else:
            schedule.append((step if schedule else 0, plan))
    return tuple(schedule)


def plan_at(schedule: Sequence[tuple[int, Plan]], step: int) -> Plan:
    """Return the plan that holds from the start of a step."""
    return next(plan for start, plan in reversed(schedule) if start <= step)


def _as_it_was(current: Plan, plan: Plan, config: RunConfig, memory: TransitionMemory) -> Plan:
    """Return a plan in the rank order in which an earlier move left it; as it is where that couldn't be now."""
    try:
        return plan_transition(current, plan, memory, transport=config.transport).target
    except ValueError:
        return plan


def _resolve(
    entry: Any, config: RunConfig, memory: TransitionMemory, capacities: Mapping[int, int], frame: Frame
) -> Plan:
    specs, workload, precision = memory.specs, memory.workload, memory.precision
    micro_batch = config.ppo.most_micro_batch
    if entry == "auto":
        may_grow = config.adapt.enabled and not isinstance(config.plan, tuple)
        found = first_plan(frame, may_grow=may_grow)
        # Where the planner finds none, this one says what lacks.
        return found or plan_auto(specs, capacities, workload, precision, micro_batch=micro_batch)
    entries: dict[str, dict[str, Any]] = {str(name): part.model_dump() for name, part in entry.items()}
    plan = resolve_plan(entries, specs, capacities, workload, precision, micro_batch=micro_batch)
    check_memory(plan, specs, workload, precision, capacities)
    return plan


def _with_step(sentence: str, step: int) -> str:
    """Return a sentence about a plan as one about the plan of a step."""
    where = f"plan from step {step} on"
    begins = re.match(r"plan([. ])", sentence)
    if begins is None:
        return f"{where}: {sentence}"
    return f"{where}{', ' if begins[1] == '.' else ' '}{sentence[begins.end() :]}"
