"""How long all primitives of a graph take together: a schedule in virtual time, and with it the price of a graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from nereus.transition.durations import durations, setup_seconds, storage_seconds, verify_seconds
from nereus.transition.memory import TransitionMemory
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.speeds import Speeds

# Beside the primitives: sum up, connect, sum up again, put in force, end.
_COMMANDS = 5
# By id, when a primitive starts and when it ends.
Times = Mapping[str, tuple[float, float]]


def price_graph(graph: TransitionGraph, memory: TransitionMemory, speeds: Speeds) -> float:
    """Return the seconds of a transition: set-up of communicators, the moves, verification and commit."""
    if not graph.primitives:
        return 0.0
    moves = moves_seconds(graph, memory, speeds)
    after = sum(primitive.after_commit for primitive in graph.primitives)
    commands = (_COMMANDS + after) * speeds.command_s
    return setup_seconds(graph, speeds) + moves + verify_seconds(graph, memory, speeds) + speeds.commit_s + commands


def moves_seconds(graph: TransitionGraph, memory: TransitionMemory, speeds: Speeds) -> float:
    """Return when the last primitive before the commit ends: the longest path, or storage that all of them share."""
    path = last_end(schedule(graph, durations(graph, memory, speeds)))
    return max(path, storage_seconds(graph, memory, speeds))


def schedule(graph: TransitionGraph, seconds: Mapping[str, float]) -> Times:
    """Return by id when each primitive before the commit starts and ends, if a device takes part in one at a time.

    The better of two rules: devices keep to the graph's order, or take the longest path first.
    """
    first = [primitive for primitive in graph.primitives if not primitive.after_commit]
    return min(in_turn(first, seconds), longest_first(first, seconds), key=last_end)


def last_end(times: Times) -> float:
    """Return when all have ended."""
    return max((end for _, end in times.values()), default=0.0)


def uses(primitive: Primitive) -> tuple[int, ...]:
    """Return the devices that can't take part in anything else meanwhile: stages write beside all else."""
    return () if primitive.kind in ("stage", "destroy") else primitive.devices


def in_turn(
    primitives: Iterable[Primitive], seconds: Mapping[str, float], edges: Mapping[str, Sequence[str]] | None = None
) -> Times:
    """Return by id when each starts and ends if every device takes part in its own in the order given.

    A restore ends no sooner than the stage it reads from.

    Args:
        edges: by id, whom a primitive waits for beside its own edges.
    """
    times: dict[str, tuple[float, float]] = {}
    free_from: dict[int, float] = {}
    for p in primitives:
        own, waits = uses(p), (*p.depends_on, *edges.get(p.id, ())) if edges else p.depends_on
        begins = [times[id][1] for id in waits]
        begins += [times[id][0] for id in p.streams]
        begins += [free_from.get(device, 0.0) for device in own]
        start = max(begins, default=0.0)
        end = max([start + seconds[p.id], *[times[id][1] for id in p.streams]])
        times[p.id] = start, end
        for device in own:
            free_from[device] = end
    return times


def longest_first(primitives: Sequence[Primitive], seconds: Mapping[str, float]) -> Times:
    """Return by id when each starts and ends if free devices turn to what has the longest path behind it.

    That is among all that could start; ties: the order given. A restore ends no sooner than the stage it reads from.
    """
    rank = paths_behind(primitives, seconds)
    order = {p.id: (-rank[p.id], number) for number, p in enumerate(primitives)}
    waits = {p.id: {*p.depends_on, *p.streams} for p in primitives}
    behind: dict[str, list[Primitive]] = {}
    for p in primitives:
        for id in waits[p.id]:
            behind.setdefault(id, []).append(p)
    times: dict[str, tuple[float, float]] = {}
    busy: set[int] = set()
    ready = [p for p in primitives if not waits[p.id]]
    events: list[tuple[float, int, Primitive]] = []
    now = 0.0

    def may_go(p: Primitive, ended: str) -> bool:
        waits[p.id].discard(ended)
        return not waits[p.id]

    while ready or events:
        ready.sort(key=lambda p: order[p.id])
        blocked = []
        while ready:
            p = ready.pop(0)
            own = uses(p)
            if not busy.isdisjoint(own):
                blocked.append(p)
                continue
            end = max(now + seconds[p.id], *(times[id][1] for id in p.streams), now)
            times[p.id] = (now, end)
            busy.update(own)
            heapq.heappush(events, (end, order[p.id][1], p))
            ready += [q for q in behind.get(p.id, ()) if p.id in q.streams and may_go(q, p.id)]
        ready = blocked
        assert events, "edges form a circle"
        now = events[0][0]
        while events and events[0][0] == now:
            _, _, p = heapq.heappop(events)
            busy.difference_update(uses(p))
            ready += [q for q in behind.get(p.id, ()) if p.id in waits[q.id] and may_go(q, p.id)]
    return times


def paths_behind(primitives: Sequence[Primitive], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return by id the seconds of the longest path that starts with a primitive."""
    longest = {p.id: seconds[p.id] for p in primitives}
    for p in reversed(primitives):
        for id in p.depends_on:
            longest[id] = max(longest[id], seconds[id] + longest[p.id])
    return longest
