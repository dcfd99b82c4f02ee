"""Which plan: by hand, automatic, or the best of the plan space by predicted step time."""

from nereus.planner.auto import plan_auto, resolve_plan

__all__ = ["plan_auto", "resolve_plan"]
