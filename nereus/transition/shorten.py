"""Another serial order of the same primitives, with other edges for memory, that ends sooner: a small local search."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from nereus.transition.critical_path import in_turn, last_end, longest_first, paths_behind, schedule, uses
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.resource_edges import find_resource_edges

# Larger graphs keep their order: every try costs time that grows with the graph, and what it finds is less and less.
MOST_PRIMITIVES = 48
_TRIES, _MOST_PLACED = 400, 8000


def shorten(graph: TransitionGraph, seconds: Mapping[str, float], *, tries: int = _TRIES) -> TransitionGraph:
    """Return the graph, or one with the same primitives and state edges that is expected to end sooner. Deterministic.

    State edges alone keep every copy that is needed alive, in any order; so any order in which memory suffices will do.

    Args:
        seconds: by id of the primitives before the commit.
    """
    first = [primitive for primitive in graph.primitives if not primitive.after_commit]
    if not 1 < len(first) <= MOST_PRIMITIVES:
        return graph
    bare = [_without_resource_edges(primitive) for primitive in first]
    best, best_s = None, makespan(graph, seconds)
    enough_s = _least_seconds(bare, seconds) * (1 + 1e-9)
    times = longest_first(first, seconds)
    # From two sides: as it would run, and as it was found.
    for start in (sorted(bare, key=lambda primitive: times[primitive.id][0]), bare):
        order, order_s, tried, rng = start, float("inf"), start, random.Random(0)
        for _ in range(min(tries, _MOST_PLACED // len(first)) // 2):
            if best_s <= enough_s:
                break
            candidate = _put_off(tried, graph.free_bytes)
            if candidate is not None:
                edges = find_resource_edges(candidate, graph.free_bytes)
                candidate_s = last_end(in_turn(candidate, seconds, edges))
                if candidate_s <= order_s:
                    order, order_s = candidate, candidate_s
                if candidate_s < best_s:
                    best, best_s = candidate, candidate_s
            tried = _moved(order, rng)
    if best is None:
        return graph
    return replace(graph, primitives=(*_with_edges(best, graph.free_bytes), *graph.primitives[len(first) :]))


def makespan(graph: TransitionGraph, seconds: Mapping[str, float]) -> float:
    """Return when the last primitive before the commit ends."""
    return last_end(schedule(graph, seconds))


def _without_resource_edges(primitive: Primitive) -> Primitive:
    edges = tuple(id for id in primitive.depends_on if id not in primitive.resource_edges)
    return replace(primitive, depends_on=edges, resource_edges=())


def _with_edges(order: Sequence[Primitive], free_bytes: Mapping[int, int]) -> list[Primitive]:
    found = find_resource_edges(order, free_bytes)
    return [
        replace(p, depends_on=(*p.depends_on, *found[p.id]), resource_edges=tuple(found[p.id])) if p.id in found else p
        for p in order
    ]


def _least_seconds(bare: Sequence[Primitive], seconds: Mapping[str, float]) -> float:
    """Return what no order goes below: the longest path, or what one device does, with what goes before and after.

    Args:
        bare: with state edges only, in a serial order.
    """
    behind = paths_behind(bare, seconds)
    before: dict[str, float] = {}
    of_device: dict[int, list[str]] = {}
    for p in bare:
        before[p.id] = max((before[id] + seconds[id] for id in p.depends_on), default=0.0)
        for device in uses(p):
            of_device.setdefault(device, []).append(p.id)
    busy = (
        min(before[id] for id in ids) + sum(seconds[id] for id in ids) + min(behind[id] - seconds[id] for id in ids)
        for ids in of_device.values()
    )
    return max(*busy, *behind.values())


def _put_off(order: Iterable[Primitive], free_bytes: Mapping[int, int]) -> list[Primitive] | None:
    """Return the order with each primitive put off until its state and its memory are there; None where some never are.

    A primitive that has to wait lets others pass.
    """
    free, waiting, done = dict(free_bytes), list(order), dict[str, Primitive]()
    before = {primitive.id: {*primitive.depends_on, *primitive.streams} for primitive in waiting}
    while waiting:
        number = next(
            (number for number, p in enumerate(waiting) if done.keys() >= before[p.id] and _fits(p, free)), None
        )
        if number is None:
            return None
        primitive = waiting.pop(number)
        done[primitive.id] = primitive
        for device, (_, held) in primitive.memory.items():
            free[device] -= held
    return list(done.values())


def _fits(primitive: Primitive, free: Mapping[int, int]) -> bool:
    return all(peak <= 0 or peak <= free[device] for device, (peak, _) in primitive.memory.items())


def _moved(order: Sequence[Primitive], rng: random.Random) -> list[Primitive]:
    """Return the order with one to three primitives at other places."""
    moved = list(order)
    for _ in range(rng.randint(1, 3)):
        primitive = moved.pop(rng.randrange(len(moved)))
        moved.insert(rng.randint(0, len(moved)), primitive)
    return moved
