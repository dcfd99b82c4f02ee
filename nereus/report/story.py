"""The story of a run: what happened, in the order in which it happened, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nereus.report.decisions import decision_rows, describe_move, match_moves
from nereus.report.plans import describe_plan, describe_ranges
from nereus.report.summary import summarize

Record = Mapping[str, Any]

# A page that is read has no more entries; what matters least is left out first.
MOST_ENTRIES = 40
_LEAST_FIRST = ("keep", "refuse", "scheduled", "warning")


@dataclass(frozen=True)
class Entry:
    """One thing that happened before or in a step; `kind` is a verdict, or start, devices, scheduled, undone, ..."""

    step: int
    kind: str
    text: str
    detail: str = ""


def tell_story(
    history: Sequence[Record], decisions: Sequence[Record] = (), transitions: Sequence[Record] = ()
) -> tuple[list[Entry], int]:
    """Return the entries of a run's story in order, and how many are left out because there are too many."""
    if not history:
        return [], 0
    first, last = history[0], history[-1]
    start = Entry(first["step"], "start", f"{_describe_start(first)}: {describe_plan(first.get('plan', {}))}.")
    entries = [*_tell_devices(history), *_tell_changes(decisions, transitions), *_tell_warnings(history)]
    kept = _keep_what_matters(entries, MOST_ENTRIES)
    kept.sort(key=lambda entry: entry.step)  # stable: devices, then decisions, then warnings of a step
    end = Entry(last["step"], "end", _describe_end(history, transitions))
    return [start, *kept, end], len(entries) - len(kept)


def summarize_in_words(history: Sequence[Record], transitions: Sequence[Record]) -> str:
    """Return the run in one or two sentences, for the head of the page."""
    counts = sorted({len(line["devices_present"]) for line in history if line.get("devices_present")})
    devices = ""
    if counts:
        plural = "" if counts[-1] == 1 else "s"
        devices = f" on {counts[0]} device{plural}" if len(counts) == 1 else f" on {counts[0]} to {counts[-1]} devices"
    committed = sum(line["outcome"] == "committed" for line in transitions)
    text = f"{len(history)} step{'' if len(history) == 1 else 's'}{devices}."
    if committed:
        times = "once" if committed == 1 else f"{committed} times"
        text += f" The plan changed {times}, which took {transition_share(history):.1%} of the time."
    return text


def transition_share(history: Sequence[Record]) -> float:
    """Return the part of a run's seconds that changes of the plan took, undone ones included."""
    total = sum(line.get("seconds", {}).get("total", 0.0) for line in history)
    return sum(line.get("seconds", {}).get("transition", 0.0) for line in history) / total if total else 0.0


def group_warnings(history: Sequence[Record]) -> list[tuple[list[int], str]]:
    """Return the warnings of a run by their subject, each with its steps and its newest text.

    Two texts have one subject when they differ in numbers only.
    """
    found: dict[str, tuple[list[int], str]] = {}
    for line in history:
        for text in line.get("warnings") or ():
            subject = "".join(letter for letter in text if letter.isalpha())
            steps = found[subject][0] if subject in found else []
            found[subject] = ([*steps, line["step"]], text)
    return list(found.values())


def _tell_devices(history: Sequence[Record]) -> Iterator[Entry]:
    known = set(history[0].get("devices_present") or ())
    before = known
    for line in history[1:]:
        now = set(line.get("devices_present") or before)
        if now != before:
            parts = []
            if before - now:
                parts.append(f"{_name(before - now)} left")
            if now - before:
                came = "came back" if now - before <= known else "came"
                name = _name(now - before)
                parts.append(f"{name[0].lower() + name[1:] if parts else name} {came}")
            known = known | now
            yield Entry(line["step"], "devices", f"{' and '.join(parts)}: {_count(now)} now.")
        before = now


def _tell_changes(decisions: Sequence[Record], transitions: Sequence[Record]) -> Iterator[Entry]:
    moves = list(enumerate(match_moves(decisions, transitions), start=1))
    numbers = {id(move.decision): number for number, move in moves if not move.is_retry}
    for decision, row in zip(decisions, decision_rows(decisions, transitions), strict=True):
        outcome = _describe_outcome(row, numbers.get(id(decision)))
        yield Entry(decision["step"], decision["verdict"], decision["reason"], outcome)
    for number, move in moves:
        if move.line["outcome"] != "committed" or move.is_retry or move.decision is None:
            kind = "retry" if move.is_retry and move.kind != "undone" else move.kind
            yield Entry(move.step, kind, f"Change {number}. {describe_move(move)}.")


def _describe_outcome(row: Mapping[str, str], number: int | None) -> str:
    """Return what a decision weighed, the number of the change that carried it out, and what was measured then."""
    parts = [] if row["verdict"] == "keep" else [row["candidate"]]
    if number is not None:
        parts[0] = f"Change {number}: {parts[0]}"
    if row["measured move"]:
        parts.append(f"the move took {row['measured move']}")
    if row["measured"]:
        parts.append(f"the next step took {row['measured']}")
    return "; ".join(parts)


def _tell_warnings(history: Sequence[Record]) -> Iterator[Entry]:
    for steps, text in group_warnings(history):
        again = f" (also at {describe_ranges(steps[1:])})" if steps[1:] else ""
        yield Entry(steps[0], "warning", f"{text}{again}")


def _keep_what_matters(entries: Sequence[Entry], most: int) -> list[Entry]:
    """Return at most so many entries: the kinds that matter least go first, of each kind the earliest."""
    kept = list(entries)
    for kind in (*_LEAST_FIRST, None):
        excess = len(kept) - most
        if excess <= 0:
            break
        going = [entry for entry in kept if kind is None or entry.kind == kind][:excess]
        gone = set(map(id, going))
        kept = [entry for entry in kept if id(entry) not in gone]
    return kept


def _describe_start(line: Record) -> str:
    present = line.get("devices_present")
    where = f" on {_count(set(present))}" if present else ""
    begins = "The run begins" if line["step"] == 0 else f"What is known begins with step {line['step']}"
    return f"{begins}{where} with the plan (dp x tp x pp on devices)"


def _describe_end(history: Sequence[Record], transitions: Sequence[Record]) -> str:
    summary = summarize(history)
    moved = sum(line["outcome"] == "committed" for line in transitions)
    changes = f", {moved} change{'' if moved == 1 else 's'} of the plan" if moved else ""
    return (
        f"{summary['steps']} steps took {summary['seconds']:.1f} s{changes}; the reward went from "
        f"{summary['reward_first']:.3f} to {summary['reward_last']:.3f}, responses from "
        f"{summary['response_tokens_first']:.0f} to {summary['response_tokens_last']:.0f} tokens."
    )


def _name(devices: set[int]) -> str:
    return f"Device{'' if len(devices) == 1 else 's'} {describe_ranges(sorted(devices))}"


def _count(devices: set[int]) -> str:
    return f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
