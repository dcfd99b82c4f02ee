"""The part of a run config that says where model-stages run: one plan, or a schedule of plans."""

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from nereus.config.parts import Part


class PlanEntry(Part):
    """Where one model-stage runs."""

    dp: int = Field(1, gt=0, description="Replicas.")
    tp: int = Field(1, gt=0, description="Tensor-parallel degree of a replica.")
    pp: int = Field(1, gt=0, description="Pipeline stages of a replica.")
    devices: tuple[int, ...] | None = Field(
        None, description="dp * tp * pp device ids: replica, then pipeline stage, then tp rank; empty: from 0 on."
    )
    micro_batch: Annotated[int, Field(gt=0)] | None = Field(
        None, description="Most samples in one packed micro-batch of one replica; empty: ppo.micro_batch."
    )
    recompute: bool = Field(False, description="Recompute activations in the backward pass to save memory.")


ModelStageName = Literal["actor.generation", "actor.training", "critic.training", "reference.inference",
                         "reward.inference"]  # fmt: skip
_SCHEDULE = "[[0, {...}], [4, {...}]]"
OnePlan = Literal["auto"] | dict[ModelStageName, PlanEntry]
PlanSchedule = tuple[tuple[int, OnePlan], ...]


def check_plan_form(plan: Any) -> Any:
    """Return what `plan` says as it is.

    Raises:
        ValueError: it is neither `auto` nor a mapping nor a schedule of these by ascending steps from 0 on.
    """
    if isinstance(plan, list | tuple):
        if not plan:
            raise ValueError(f"the schedule is empty; give `auto`, or a plan from step 0 on, such as {_SCHEDULE}")
        steps = [_schedule_step(entry) for entry in plan]
        if steps[0] != 0:
            raise ValueError(f"the schedule begins at step {steps[0]}; its first entry must hold from step 0 on")
        for before, step in itertools.pairwise(steps):
            if step <= before:
                raise ValueError(f"the schedule names step {step} after step {before}; let its steps ascend")
    elif plan != "auto" and not isinstance(plan, Mapping):
        raise ValueError(f"{plan!r} is no plan; give `auto`, a mapping of model-stages, or a schedule like {_SCHEDULE}")
    return plan


def _schedule_step(entry: Any) -> int:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        raise ValueError(
            f"the entry {_short(entry)} of the schedule is no pair [step, plan]; write it like {_SCHEDULE}"
        )
    step, plan = entry
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"the schedule names step {step!r}; a step is an integer from 0 on")
    if plan != "auto" and not isinstance(plan, Mapping):
        raise ValueError(f"from step {step} on it is {_short(plan)}; give `auto` or a mapping of model-stages")
    return step


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
