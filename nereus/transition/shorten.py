"""Another serial order of the same primitives, with other edges for memory, that ends sooner: a small local search."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from nereus.transition.critical_path import schedule
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.resource_edges import find_resource_edges

# Larger graphs keep their order: every try costs time that grows with the graph, and what it finds is less and less.
MOST_PRIMITIVES = 48
_TRIES = 200


def shorten(graph: TransitionGraph, seconds: Mapping[str, float], *, tries: int = _TRIES) -> TransitionGraph:
    """Return the graph, or one with the same primitives and state edges that is expected to end sooner. Deterministic.

    State edges alone keep every copy that is needed alive, in any order; so any order in which memory suffices will do.

    Args:
        seconds: by id of the primitives before the commit.
    """
    first = [primitive for primitive in graph.primitives if not primitive.after_commit]
    if len(first) > MOST_PRIMITIVES or not any(primitive.resource_edges for primitive in first):
        return graph
    last = graph.primitives[len(first) :]
    bare = [_without_resource_edges(primitive) for primitive in first]
    best, best_s = graph, makespan(graph, seconds)
    shortest_s = makespan(replace(graph, primitives=tuple(bare)), seconds)
    times = schedule(graph, seconds)
    order = sorted(bare, key=lambda primitive: times[primitive.id])  # as it would run
    rng = random.Random(0)
    for _ in range(tries):
        if best_s <= shortest_s:
            break
        if _fits(order, graph.free_bytes):
            candidate = replace(graph, primitives=(*_with_edges(order, graph.free_bytes), *last))
            candidate_s = makespan(candidate, seconds)
            if candidate_s <= best_s:
                best, best_s, bare = candidate, candidate_s, order
        order = _moved(bare, rng)
    return best


def makespan(graph: TransitionGraph, seconds: Mapping[str, float]) -> float:
    """Return when the last primitive before the commit ends."""
    return max((end for _, end in schedule(graph, seconds).values()), default=0.0)


def _without_resource_edges(primitive: Primitive) -> Primitive:
    edges = tuple(id for id in primitive.depends_on if id not in primitive.resource_edges)
    return replace(primitive, depends_on=edges, resource_edges=())


def _with_edges(order: Sequence[Primitive], free_bytes: Mapping[int, int]) -> list[Primitive]:
    found = find_resource_edges(order, free_bytes)
    return [
        replace(p, depends_on=(*p.depends_on, *found[p.id]), resource_edges=tuple(found[p.id])) if p.id in found else p
        for p in order
    ]


def _fits(order: Sequence[Primitive], free_bytes: Mapping[int, int]) -> bool:
    """Return whether every reservation finds its memory, one primitive after the other."""
    free = dict(free_bytes)
    for primitive in order:
        for device, (peak, held) in primitive.memory.items():
            if peak and peak > free[device]:
                return False
            free[device] -= held
    return True


def _moved(order: Sequence[Primitive], rng: random.Random) -> list[Primitive]:
    """Return the order with one or two primitives at another place that their state edges allow."""
    moved = list(order)
    for _ in range(rng.choice((1, 1, 2))):
        primitive = moved.pop(rng.randrange(len(moved)))
        before = {*primitive.depends_on, *primitive.streams}
        low = max((i + 1 for i, other in enumerate(moved) if other.id in before), default=0)
        behind = (i for i, other in enumerate(moved) if primitive.id in (*other.depends_on, *other.streams))
        moved.insert(rng.randint(low, min(behind, default=len(moved))), primitive)
    return moved
