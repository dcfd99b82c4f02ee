"""A change of the plan in words: what changed, how much was moved, how long it took, how it ended."""

from collections.abc import Mapping
from typing import Any

from nereus.plan import Plan
from nereus.transition.memory import format_bytes

_OUTCOMES = {"rolled_back": "undone: the old plan holds", "recovered": "failed: built again from the last commit"}


def describe_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the model-stages of two plan records that differ, such as `actor.training 1x2x1 on 0,1 -> 2x1x1 on 0,1`.

    Numbers are dp x tp x pp, as in `Plan.describe`.
    """
    before, after = _by_name(old), _by_name(new)
    changed = [f"{name} {before[name]} -> {after[name]}" for name in after if before[name] != after[name]]
    return "; ".join(changed) or "nothing"


def describe_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return how the settings of two plan records with the same places differ."""
    changes = []
    for name, stage in new.items():
        before = old[name]
        if stage["micro_batch"] != before["micro_batch"]:
            changes.append(f"{name} micro-batch {before['micro_batch']} -> {stage['micro_batch']}")
        if stage["recompute"] != before["recompute"]:
            changes.append(f"{name} recomputation {'on' if stage['recompute'] else 'off'}")
    return "; ".join(changes)


def describe_outcome(line: Mapping[str, Any]) -> str:
    """Return what a line of transitions.jsonl came to, such as `12.30 MiB in 0.82 s, committed`."""
    outcome = _OUTCOMES.get(line["outcome"], line["outcome"])
    reason = f" ({line['reason']})" if line.get("reason") else ""
    return f"{format_bytes(line['bytes'])} in {line['seconds']:.2f} s, {outcome}{reason}"


def _by_name(record: Mapping[str, Any]) -> dict[str, str]:
    return dict(part.split(" ", 1) for part in Plan.from_record(record).describe().split("; "))
