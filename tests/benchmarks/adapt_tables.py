"""What the runs of `adapt` came to, as tables and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tests.benchmarks.report import print_table

# Of the time of a run, and of the first responses.
MOST_TRANSITION_SHARE, LEAST_GROWTH = 0.01, 8.0
_FIRST = "payback"

Record = Mapping[str, Any]


def print_report(runs: Sequence[Record]) -> None:
    """Print totals, where the time goes, the moves of each policy, and whether it is as wanted."""
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    by_policy = {policy: [run for run in runs if run["policy"] == policy] for policy in policies}
    _print_totals(by_policy)
    _print_parts(by_policy)
    _print_stretches(by_policy)
    _print_moves(by_policy)
    _print_verdicts(by_policy)


def _print_totals(by_policy: Mapping[str, Sequence[Record]]) -> None:
    rows = []
    for policy, runs in by_policy.items():
        totals = [run["summary"]["total_s"] for run in runs]
        gains = gains_over(by_policy, policy)
        rows.append(
            (
                policy,
                f"{median(totals):.1f}",
                f"{min(totals):.1f} - {max(totals):.1f}",
                f"{_spread(gains)}" if policy != _FIRST and gains else None,
                *(_median(runs, key) for key in ("step_s", "transitions", "layout_transitions")),
                f"{100 * _median(runs, 'transition_share'):.2f}",
                f"{100 * _median(runs, 'prediction_error'):.0f}",
                f"{100 * _median(runs, 'waited_share'):.1f}",
            )
        )
    columns = ("policy", "total s", "least - most", f"{_FIRST} saves %", "step s", "moves", "of tp, pp", "moves %",
               "off %", "waited %")  # fmt: skip
    print_table(f"Whole runs, medians of {_num_seeds(by_policy)} seeds", columns, rows)


def gains_over(by_policy: Mapping[str, Sequence[Record]], policy: str) -> list[float]:
    """Return by seed the share of a policy's time that payback saves."""
    first = {run["seed"]: run["summary"]["total_s"] for run in by_policy.get(_FIRST, ())}
    return [1 - first[run["seed"]] / run["summary"]["total_s"] for run in by_policy[policy] if run["seed"] in first]


def _spread(gains: Sequence[float]) -> str:
    least, most = (f"{100 * gain:+.1f}" for gain in (min(gains), max(gains)))
    return f"{100 * median(gains):+.1f} ({least} to {most})"


def _print_parts(by_policy: Mapping[str, Sequence[Record]]) -> None:
    parts = next(iter(by_policy.values()))[0]["summary"]["seconds"]
    rows = [
        (policy, *(median(run["summary"]["seconds"][part] for run in runs) for part in parts))
        for policy, runs in by_policy.items()
    ]
    print_table("Where the seconds of a run go, medians", ("policy", *(part.replace("_", " ") for part in parts)), rows)


def _print_stretches(by_policy: Mapping[str, Sequence[Record]]) -> None:
    """Print what each policy took between the changes of the devices: there it shows what a policy gains where."""
    rows, columns = [], ["policy"]
    for policy, runs in by_policy.items():
        split = [stretches(run["steps"]) for run in runs]
        split = [one for one in split if len(one) == len(split[0])]
        columns = ["policy", *(describe_stretch(steps) for steps in split[0])]
        seconds = [[sum(step["seconds"]["total"] for step in steps) for steps in one] for one in split]
        rows.append((policy, *(median(column) for column in zip(*seconds, strict=True))))
    print_table("Seconds of a run from one change of the devices to the next, medians", columns, rows)


def stretches(steps: Sequence[Record]) -> list[list[Record]]:
    """Return the steps of a run in groups, each from one change of the devices to the next; short ones are one."""
    groups: list[list[Record]] = []
    for step in steps:
        if not groups or step["devices_present"] != groups[-1][-1]["devices_present"]:
            groups.append([])
        groups[-1].append(step)
    joined: list[list[Record]] = []
    before_is_short = False
    for group in groups:
        is_short = len(group) < _SHORT_STRETCH
        if is_short and before_is_short:
            joined[-1] = [*joined[-1], *group]
        else:
            joined.append(group)
        before_is_short = is_short
    return joined


# Steps; where devices change sooner, the stretch is all the time in which they do.
_SHORT_STRETCH = 5


def describe_stretch(steps: Sequence[Record]) -> str:
    """Return the devices of a stretch and how long its responses were at both of its ends."""
    first, last = (round(step["response_tokens_mean"]) for step in (steps[0], steps[-1]))
    counts = sorted({len(step["devices_present"]) for step in steps})
    return f"{' or '.join(map(str, counts))} device{'' if counts == [1] else 's'}, {first}-{last}"


def _print_moves(by_policy: Mapping[str, Sequence[Record]]) -> None:
    """Print each policy's moves with one seed, with what was predicted and measured of them."""
    rows = []
    for policy, runs in by_policy.items():
        decisions = [one for one in runs[0]["decisions"] if "transition_s" in one.get("measured", {})]
        for one in decisions:
            prices = [seconds for seconds in one["transition_s"].values() if seconds is not None]
            now_s, then_s = one["latency_current_s"], one["latency_candidate_s"]
            measured = one["measured"]
            rows.append(
                (policy, short_plan(one["candidate"]), one["step"], one["verdict"], now_s, then_s,
                 measured.get("latency_s"), min(prices), measured["transition_s"])
            )  # fmt: skip
    columns = ("policy", "to", "step", "verdict", "stay s", "go s", "took s", "move s", "took s")
    print_table("Moves with the first seed: predicted seconds and what they took", columns, rows, num_names=2)


_SHORT = {"actor.generation": "gen", "actor.training": "actor", "critic.training": "critic"}


def short_plan(plan: Mapping[str, Mapping[str, Any]]) -> str:
    """Return where each model-stage runs, such as `gen 01 actor 01:tp2 critic 1 ref 01`."""
    words = []
    for name, stage in plan.items():
        layout = "".join(f":{axis}{stage[axis]}" for axis in ("tp", "pp") if stage[axis] > 1)
        words.append(f"{_SHORT.get(name, 'ref')} {''.join(map(str, stage['devices']))}{layout}")
    return " ".join(words)


def _print_verdicts(by_policy: Mapping[str, Sequence[Record]]) -> None:
    def say(what: str, is_met: bool) -> None:
        print(f"{what}: {'as wanted' if is_met else 'NOT as wanted'}", flush=True)

    runs = [run for group in by_policy.values() for run in group]
    growth = min(run["summary"]["growth"] for run in runs)
    say(f"responses grow {growth:.1f}-fold at least, wanted {LEAST_GROWTH:g}", growth >= LEAST_GROWTH)
    same = all(len({_digests(run) for run in runs if run["seed"] == seed}) == 1 for seed in {r["seed"] for r in runs})
    say(f"all policies have {'the same' if same else 'DIFFERENT'} rollouts in every step", same)
    if _FIRST not in by_policy:
        return
    share = _median(by_policy[_FIRST], "transition_share")
    say(f"{_FIRST}: transitions take {share:.2%} of the time", share <= MOST_TRANSITION_SHARE)
    for policy in by_policy:
        if policy != _FIRST:
            gains = gains_over(by_policy, policy)
            say(f"{_FIRST} saves {_spread(gains)} % of the time of {policy}", median(gains) > 0)


def _digests(run: Record) -> tuple[str, ...]:
    return tuple(step["rollouts_digest"] for step in run["steps"])


def _median(runs: Sequence[Record], key: str) -> float:
    return median(run["summary"][key] or 0.0 for run in runs)


def _num_seeds(by_policy: Mapping[str, Sequence[Record]]) -> int:
    return min(len(runs) for runs in by_policy.values())
