"""A plan that stays where it is, with micro-batches and recomputation picked anew."""

from __future__ import annotations

import numpy as np

from nereus.plan import Plan
from nereus.planner.candidate import Candidate
from nereus.planner.fit import Fitter
from nereus.planner.place import Place
from nereus.planner.setting import Setting


def refit_plan(plan: Plan, setting: Setting) -> Candidate | None:
    """Return the plan with the fastest micro-batches and recomputation that fit memory; None where none do.

    Layouts, dp and devices stay as they are; the plan may overlap at will, but its devices must be in the cluster.
    """
    fitted = Fitter(setting).fit(places_of(plan, setting))
    return None if fitted is None else Candidate.of(fitted, setting)


def places_of(plan: Plan, setting: Setting) -> dict[str, Place]:
    """Return where the model-stages of a plan lie in the cluster's order of devices."""
    index = {device: position for position, device in enumerate(setting.order.ids)}
    return {
        name: Place(stage.layout, stage.dp, np.array([index[device] for device in stage.devices]))
        for name, stage in plan.items()
    }
