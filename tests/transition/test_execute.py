"""One scheduler for threads and virtual time: what waits, what runs at once, and what a failure leaves."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nereus.plan import Plan
from nereus.simulator.clock import Clock
from nereus.transition.execute import Skipped, execute, on_clock, on_threads
from nereus.transition.graph import plan_transition
from nereus.transition.primitives import Primitive, TransitionGraph
from nereus.transition.walk import walk
from tests.transition.cases import LEAST_ROOM, memory_for, random_plan, stage

TRAINING = "actor.training"


def graph_of(seed: int, num_devices: int = 6, room: int = LEAST_ROOM) -> TransitionGraph:
    rng = random.Random(seed)
    current, target = (random_plan(rng, num_devices) for _ in range(2))
    return plan_transition(current, target, memory_for(current, target, room))


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_respect_the_edges(num_threads: int):
    for seed in range(10):
        check_on_threads(graph_of(seed), num_threads, random.Random(seed))


def check_on_threads(graph: TransitionGraph, num_threads: int, rng: random.Random) -> None:
    lock, started, ended = threading.Lock(), list[str](), list[str]()

    def run(primitive: Primitive) -> str:
        with lock:
            assert set(primitive.depends_on) <= set(ended)
            started.append(primitive.id)
        time.sleep(rng.random() * 1e-3)
        with lock:
            ended.append(primitive.id)
        return primitive.kind

    with ThreadPoolExecutor(num_threads) as pool:
        results = execute(graph, on_threads(pool, run))
        assert results == {p.id: p.kind for p in graph.primitives if not p.after_commit}
        after = execute(graph, on_threads(pool, lambda p: p.kind), after_commit=True)
        assert set(after) == {p.id for p in graph.primitives if p.after_commit}
    for p in graph.primitives:
        for id in p.streams:
            assert started.index(id) < started.index(p.id)


def test_what_is_ready_runs_at_the_same_time():
    """Two copies between different devices meet at a barrier: neither could end alone."""
    current = Plan.of({TRAINING: stage(1, 1, 1), "critic.training": stage(1, 1, 1, [1])})
    target = Plan.of({TRAINING: stage(1, 1, 1, [2]), "critic.training": stage(1, 1, 1, [3])})
    graph = plan_transition(current, target, memory_for(current, target, 10**6))
    barrier = threading.Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        execute(graph, on_threads(pool, lambda primitive: barrier.wait(5)))


def test_many_waiting_primitives_take_up_no_thread():
    """A chain of depth 40 on two threads, all handed out at once."""
    first = Primitive("p0", "extend", TRAINING)
    chain = [first, *(replace(first, id=f"p{n}", depends_on=(f"p{n - 1}",)) for n in range(1, 40))]
    plan = Plan.of({TRAINING: stage(1, 1, 1)})
    graph = TransitionGraph(plan, plan, tuple(chain))
    order: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        execute(graph, on_threads(pool, lambda primitive: order.append(primitive.id)))
    assert order == [p.id for p in chain]


def test_a_failure_skips_what_depends_on_it_and_nothing_else():
    first = Primitive("bad", "extend", TRAINING)
    others = [
        replace(first, id="child", depends_on=("bad",)),
        replace(first, id="grandchild", depends_on=("child",)),
        replace(first, id="other"),
    ]
    plan = Plan.of({TRAINING: stage(1, 1, 1)})
    ran, futures = [], {}

    def run(primitive: Primitive) -> None:
        if primitive.id == "bad":
            raise RuntimeError("the disk is full")
        ran.append(primitive.id)

    with ThreadPoolExecutor(2) as pool:
        submit = on_threads(pool, run)

        def remember(primitive, wait_for):
            futures[primitive.id] = submit(primitive, wait_for)
            return futures[primitive.id]

        with pytest.raises(RuntimeError, match="the disk is full"):
            execute(TransitionGraph(plan, plan, (first, *others)), remember)
    assert ran == ["other"]
    assert all(future.done() for future in futures.values())
    with pytest.raises(Skipped, match="grandchild didn't run"):
        futures["grandchild"].result()


def test_virtual_time_is_the_longest_path():
    for seed in range(10):
        graph = graph_of(seed)
        rng = random.Random(seed)
        seconds = {p.id: rng.random() for p in graph.primitives}
        ends = execute(graph, on_clock(Clock(), lambda p, seconds=seconds: seconds[p.id]))
        for p in graph.primitives:
            if not p.after_commit:
                before = max((ends[id] for id in p.depends_on), default=0.0)
                assert ends[p.id] == pytest.approx(before + seconds[p.id])


def test_threads_and_the_walk_agree_on_what_is_left():
    graph = graph_of(3)
    assert set(walk(graph, lambda ready, running: (False, running[0]) if running else (True, ready[0]))) == set(
        execute(graph, on_clock(Clock(), lambda p: 1.0))
    )
