"""A driver of transitions without workers: it runs any graph, checks its order, and fails where it is told to."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from typing import Any

from nereus.layout import Layout
from nereus.plan import Plan, StagePlan
from nereus.transition.execute import execute
from nereus.transition.primitives import Primitive, TransitionGraph

STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")
KINDS = ("extend", "reshard", "destroy")


def plan_on(dp: int, tp: int = 1) -> Plan:
    return Plan.of({name: StagePlan(dp, Layout(tp, 1), tuple(range(dp * tp)), 4) for name in STAGES})


def random_graph(seed: int, num_primitives: int) -> TransitionGraph:
    """Return a graph in which each primitive may wait for any of those before it, and the last is after the commit."""
    rng = random.Random(seed)
    primitives: list[Primitive] = []
    for number in range(num_primitives):
        name, kind = STAGES[number % 3], KINDS[number // 3 % 3]
        earlier = [primitive.id for primitive in primitives]
        waits = tuple(rng.sample(earlier, min(len(earlier), rng.randint(0, 3))))
        moved = 0 if kind == "destroy" else 3 << 20
        made = Primitive(
            f"{name}/{kind}/{number}",
            kind,  # type: ignore[arg-type]
            name,
            depends_on=waits,
            bytes=moved,
            devices=(0,),
            transport="none" if kind == "destroy" else "direct",
            after_commit=number == num_primitives - 1,
        )
        primitives.append(made)
    return TransitionGraph(plan_on(2), plan_on(1, tp=2), tuple(primitives))


class FakeTransition:
    """Runs primitives in no time, each only when all that it waits for has ended."""

    def __init__(self, step: int, graph: TransitionGraph, *, fail_at: str | None = None, delay_s: float = 0.002):
        self.graph, self.step = graph, step
        self.predicted_s = dict.fromkeys(graph.by_id, 0.01)
        self.ended: list[str] = []
        self._fail_at, self._delay_s, self._lock = fail_at, delay_s, threading.Lock()

    def run_primitive(self, id: str) -> dict[str, Any]:
        primitive = self.graph.by_id[id]
        with self._lock:
            assert set(primitive.depends_on) <= set(self.ended), f"{id} runs too early"
        time.sleep(random.random() * self._delay_s)
        if id == self._fail_at:
            raise RuntimeError(f"device 1 died in {id}.")
        with self._lock:
            self.ended.append(id)
        return {"bytes": primitive.bytes, "seconds": 0.25}

    def run(self, submit: Any) -> dict[str, Any]:
        try:
            results = execute(self.graph, submit) | execute(self.graph, submit, after_commit=True)
        except RuntimeError:
            return self._line("rolled_back", {})
        return self._line("committed", results)

    def _line(self, outcome: str, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
        primitives: Sequence[dict[str, Any]] = [
            {"id": part.id, "kind": part.kind, "model_stage": part.model_stage, "depends_on": list(part.depends_on),
             "transport": part.transport, **results[part.id]}
            for part in self.graph.primitives if part.id in results
        ]  # fmt: skip
        old, new = self.graph.current.to_record(), self.graph.target.to_record()
        return {"step": self.step, "from": old, "to": new, "primitives": primitives, "seconds": 1.5,
                "bytes": sum(part["bytes"] for part in primitives), "verified": bool(results),
                "outcome": outcome}  # fmt: skip
