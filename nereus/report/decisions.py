"""Decisions for people: what was weighed, what came of it, and how predictions compare with what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.report.plans import describe_stage, group_by_text
from nereus.report.transition import describe_outcome

Record = Mapping[str, Any]

# What a verdict of decisions.jsonl means, in a few words.
VERDICTS = {
    "admit": "the move pays back in time",
    "urgent": "the plan can't run on",
    "refuse": "a faster plan exists, but the move to it doesn't pay back in time",
    "keep": "the plan in force is still the best",
}
MOVES = ("admit", "urgent")


@dataclass(frozen=True)
class Move:
    """A transition and the decision it carries out, if there is one; a retry is another try at the same."""

    line: Record
    decision: Record | None
    is_retry: bool = False

    @property
    def step(self) -> int:
        return self.line["step"]

    @property
    def kind(self) -> str:
        """One of urgent, admit, scheduled; `undone` if the old plan holds, `rebuilt` if the new one is the old one."""
        if self.line["outcome"] != "committed" and self.line.get("in_force") != "to":
            return "undone"
        if self.decision is not None:
            return self.decision["verdict"]
        return "scheduled" if describe_places(self.line["from"], self.line["to"]) else "rebuilt"


def match_moves(decisions: Sequence[Record], transitions: Sequence[Record]) -> list[Move]:
    """Return every transition with its decision: the last one up to its step that wanted the same plan."""
    wanted = [decision for decision in decisions if decision["verdict"] in MOVES]
    last_for: dict[Any, Record] = {}
    moves, met, begun = [], 0, set()
    for line in transitions:
        while met < len(wanted) and wanted[met]["step"] <= line["step"]:
            last_for[_layouts(wanted[met]["candidate"])] = wanted[met]
            met += 1
        found = last_for.get(_layouts(line["to"]))
        stays = not describe_places(line["from"], line["to"])
        if stays and (found is None or found["step"] != line["step"]):
            found = None  # nothing moves: what a lost worker held is brought back
        moves.append(Move(line, found, is_retry=id(found) in begun))
        if found is not None:
            begun.add(id(found))
    return moves


def describe_decision(record: Record) -> str:
    """Return a decision in words, such as `urgent before step 10: The plan needs devices that are gone, ...`."""
    return f"{record['verdict']} before step {record['step']}: {record['reason']}"


def describe_target(record: Record) -> str:
    """Return how the candidate of a decision differs from the plan in force, settings that move nothing included."""
    if record["verdict"] == "keep":
        return "none"
    return describe_places(record["current"], record["candidate"]) or describe_settings(
        record["current"], record["candidate"]
    )


def describe_places(old: Record, new: Record) -> str:
    """Return what moves from one plan to another, model-stages that change alike together; "" if nothing does."""
    texts = {name: (describe_stage(old[name]), describe_stage(entry)) for name, entry in new.items() if name in old}
    groups = group_by_text({name: f"{before} -> {after}" for name, (before, after) in texts.items() if before != after})
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(new) > 1:
        return f"all model-stages {next(iter(groups))}"
    return "; ".join(f"{', '.join(names)} {text}" for text, names in groups.items())


def describe_settings(old: Record, new: Record) -> str:
    """Return the micro-batches and recomputation that differ, as in `actor.training micro-batch 8 -> 4, recompute`."""
    parts = []
    for name, entry in new.items():
        before = old.get(name, entry)
        words = []
        if before.get("micro_batch") != entry.get("micro_batch"):
            words.append(f"micro-batch {before.get('micro_batch')} -> {entry.get('micro_batch')}")
        if before.get("recompute") != entry.get("recompute"):
            words.append("recompute" if entry.get("recompute") else "no recompute")
        parts += [f"{name} {', '.join(words)}"] if words else []
    return "; ".join(parts) or "nothing"


def decision_rows(decisions: Sequence[Record], transitions: Sequence[Record] = ()) -> list[dict[str, str]]:
    """Return one row a decision with its numbers as text; columns are the same in all rows, unknown cells empty.

    The measured step is the first one after the decision, under the plan that was then in force; its deviation is from
    what was predicted of that plan.
    """
    took: dict[int, float] = {}
    undone = set()
    for move in match_moves(decisions, transitions):
        if not move.is_retry and move.decision is not None:
            took[id(move.decision)] = move.line["seconds"]
            undone |= {id(move.decision)} if move.kind == "undone" else set()
    rows = []
    for record in decisions:
        measured, moves = record.get("measured", {}), record["verdict"] in MOVES
        stays = not moves or id(record) in undone
        predicted = record["latency_current_s"] if stays else record["latency_candidate_s"]
        real = measured.get("transition_s", took.get(id(record))) if moves else None
        rows.append(
            {
                "before step": str(record["step"]),
                "trigger": ", ".join(record["trigger"]),
                "verdict": record["verdict"],
                "candidate": describe_target(record),
                "step now": format_s(record["latency_current_s"]),
                "candidate's": format_s(record["latency_candidate_s"]),
                "measured": _compare(predicted, measured.get("latency_s")),
                "move": "" if record["verdict"] == "keep" else _format_price(record["transition_s"]),
                "measured move": format_s(real),
                "payback": _format_payback(record),
                "reason": record["reason"],
            }
        )
    return rows


def describe_move(move: Move) -> str:
    """Return what a transition came to, and what it changed where no decision has said so."""
    outcome = describe_outcome(move.line)
    if move.decision is not None and not move.is_retry:
        return outcome
    change = describe_places(move.line["from"], move.line["to"])
    if not change:
        return f"The same plan is built again after a loss: {outcome}"
    return f"{'Tried again' if move.is_retry else 'As scheduled'}: {change}; {outcome}"


def format_s(seconds: float | None) -> str:
    """Return seconds with about three digits, empty where they aren't known."""
    if seconds is None:
        return ""
    digits = next((digits for digits, least in ((0, 100), (1, 10), (2, 0.1)) if seconds >= least), 3)
    return f"{seconds:,.{digits}f} s"


def _compare(predicted: float | None, measured: float | None) -> str:
    if measured is None or not predicted:
        return format_s(measured)
    return f"{format_s(measured)} ({measured / predicted - 1:+.0%})"


def _format_price(price: Mapping[str, float | None]) -> str:
    known = {name: price[name] for name in ("direct", "staged") if price.get(name) is not None}
    if not known:
        return ""
    transport = min(known, key=lambda name: known[name] or 0.0)
    return f"{format_s(known[transport])} {transport}"


def _format_payback(record: Record) -> str:
    """Return after how many steps the move has earned its price, of how many until the next change is expected."""
    if record["verdict"] not in ("admit", "refuse") or record.get("payback_steps") is None:
        return ""
    return f"{record['payback_steps']:.2g} of {record['horizon_steps']:.3g} steps"


def _layouts(plan: Record) -> tuple[tuple[Any, ...], ...]:
    """Return what tells plans apart, whatever the rank order of their devices."""
    return tuple((name, *(entry[key] for key in ("dp", "tp", "pp"))) for name, entry in plan.items())
