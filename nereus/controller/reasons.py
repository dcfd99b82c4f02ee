"""A decision in one sentence that a person understands."""

from __future__ import annotations

from collections.abc import Sequence

from nereus.controller.decision import Decision
from nereus.controller.monitor import LOST, MEMORY_VIOLATION


def explain(decision: Decision, policy: str, gamma: float) -> str:
    """Return why a decision came out as it did, with the numbers that decided it."""
    cause = _join(decision.trigger)
    moved = f"the move takes {decision.price.seconds:.1f} s ({decision.price.transport})"
    if decision.verdict == "urgent":
        what = "needs devices that are gone"
        if MEMORY_VIOLATION in decision.trigger:
            what = "no longer fits memory"
        elif LOST in decision.trigger:
            what = "has lost the state of a device"
        return f"The plan {what}, so the job goes on with one of {decision.latency_candidate_s:.1f} s a step; {moved}."
    if decision.verdict == "keep":
        latency = decision.latency_candidate_s
        return f"After a change of {cause} the plan in force is still the best, {latency:.1f} s a step."
    assert decision.latency_current_s is not None
    gain = decision.latency_current_s - decision.latency_candidate_s
    if gain <= 0:
        return f"After a change of {cause} no other plan is faster than {decision.latency_current_s:.1f} s a step."
    saved = f"a step would take {decision.latency_candidate_s:.1f} s instead of {decision.latency_current_s:.1f} s"
    if decision.verdict == "admit" and policy == "payback":
        return (
            f"After a change of {cause} {saved}; {moved} and pays back in {decision.payback_steps:.2f} steps, within "
            f"{gamma:g} of the {decision.horizon_steps:.1f} steps until the next change."
        )
    if decision.verdict == "admit":
        return f"After a change of {cause} {saved}; {moved}."
    return (
        f"After a change of {cause} {saved}, but {moved} and would pay back in {decision.payback_steps:.2f} steps, "
        f"beyond {gamma:g} of the {decision.horizon_steps:.1f} steps until the next change."
    )


def _join(names: Sequence[str], most: int = 2) -> str:
    """Return the first names as words, and how many more there are."""
    shown, more = names[:most], len(names) - most
    return ", ".join(shown) + f" and {more} more" if more > 0 else " and ".join(shown)
