"""Which plan: by hand, automatic, or the best of the plan space by predicted step time."""

from nereus.planner.auto import plan_auto, resolve_plan
from nereus.planner.candidate import Candidate, Search
from nereus.planner.plan_search import best_plans, best_with, plan_search
from nereus.planner.refit import refit_plan
from nereus.planner.setting import Setting

__all__ = [
    "Candidate",
    "Search",
    "Setting",
    "best_plans",
    "best_with",
    "plan_auto",
    "plan_search",
    "refit_plan",
    "resolve_plan",
]
