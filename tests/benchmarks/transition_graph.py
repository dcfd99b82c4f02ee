"""How long the graph of a transition takes to plan, how near its schedule is to the shortest, and what it prevents.

    python -m tests.benchmarks.transition_graph [--quick] [--json FILE]

Planning: Llama-3.1-8B PPO, five model-stages, all of them changed at once, on devices with room for both plans and on
devices that are nearly full. Schedules: random transitions of a tiny model on nearly full devices, against OR-Tools'
CP-SAT. Coordination: the same kind of transitions in virtual time, with the graph and with each model-stage for itself.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE
from nereus.cost.rank_memory import Workload
from nereus.plan import MODEL_STAGES, Plan, StagePlan
from nereus.presets import model_preset
from nereus.transition.critical_path import price_graph
from nereus.transition.graph import plan_transition
from nereus.transition.memory import TransitionMemory, resident_bytes
from nereus.transition.shorten import makespan, shorten
from nereus.transition.speeds import Speeds
from tests.benchmarks.report import describe_run, print_table, write_record
from tests.transition.cases import LEAST_ROOM, memory_for, random_plan, stage
from tests.transition.exact_schedule import shortest_makespan
from tests.transition.hold_and_wait import HoldAndWait
from tests.transition.test_coordination import KINDS, run_in_virtual_time, trial
from tests.transition.test_critical_path import random_seconds

HEADS = {"critic.training": "value", "reward.inference": "score"}
WORKLOAD = Workload(samples_per_step=1024, minibatches=4, prompt_tokens=512, response_tokens=2048, accelerator=True)
GOALS_MS = {1024: 20.0, 16384: 500.0}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", help="taken for the sake of the other benchmarks")
    parser.add_argument("--json", default="build/bench/transition_graph.json")
    options = parser.parse_args(arguments)
    sizes = (128, 1024) if options.quick else (128, 1024, 16384)
    planning = [row for num in sizes for row in measure_planning(num, repeats=3 if options.quick else 10)]
    print_table(
        "Graph of a transition, Llama-3.1-8B PPO, five model-stages; milliseconds",
        ("devices", "change", "room", "wall", "CPU", "goal", "primitives", "edges", "for memory", "price s"),
        [tuple(row.values()) for row in planning],
        num_names=3,
    )
    schedules = measure_schedules(20 if options.quick else 200)
    print_table("Makespan over the shortest (CP-SAT)", tuple(schedules), [tuple(schedules.values())])
    coordination = [measure_coordination(kind, 30 if options.quick else 300) for kind in KINDS]
    print_table(
        "Model-stages that change together on nearly full devices",
        ("kind", "trials", "done with the graph", "done each for itself"),
        [tuple(row.values()) for row in coordination],
    )
    record = {**describe_run("transition_graph", threads=1), "planning": planning, "schedules": schedules}
    write_record({**record, "coordination": coordination}, options.json)


def measure_planning(num_devices: int, *, repeats: int) -> list[dict[str, Any]]:
    """Return a row for each change and room: the quickest of some repeats, since all else is the machine's noise."""
    cluster = cluster_preset("mi250x-slingshot", num_devices)
    specs = {name: model_preset("llama-3.1-8b", HEADS.get(name, "lm")) for name in MODEL_STAGES}  # type: ignore[arg-type]
    memory = TransitionMemory.of(specs, WORKLOAD, "bfloat16", cluster.capacities)
    speeds = Speeds.of(cluster, CONSERVATIVE)

    def everywhere(placed: StagePlan) -> Plan:
        return Plan.of(dict.fromkeys(MODEL_STAGES, placed))

    half, whole = everywhere(stage(num_devices // 16, 4, 2)), everywhere(stage(num_devices // 8, 4, 2))
    deep, uneven = everywhere(stage(num_devices // 8, 2, 4)), everywhere(stage(num_devices // 6, 3, 2))
    rows = []
    for change, current, target in (
        ("dp doubled", half, whole),
        ("dp halved", whole, half),
        ("tp4 to pp4", whole, deep),
        ("dp doubled, tp4 to pp4", half, deep),
        ("tp4 to tp3", whole, uneven),
    ):
        held = [max(resident_bytes(plan, memory, plan.devices).values()) for plan in (current, target)]
        for room, usable in (("both plans", 2 * sum(held)), ("12%", int(1.12 * max(held)))):
            case = replace(memory, usable_bytes=dict.fromkeys(cluster.device_ids, usable), admits=lambda plan: True)
            walls, cpus = [], []
            for _ in range(repeats + 1):  # the first fills caches that the planner's memory model has filled before
                began, cpu = time.perf_counter(), time.process_time()
                graph = plan_transition(current, target, case, node_of=cluster.node_of)
                walls.append(time.perf_counter() - began)
                cpus.append(time.process_time() - cpu)
            rows.append(
                {
                    "devices": num_devices,
                    "change": change,
                    "room": room,
                    "wall_ms": 1e3 * min(walls),
                    "cpu_ms": 1e3 * min(cpus),
                    "goal_ms": GOALS_MS.get(num_devices),
                    "primitives": len(graph.primitives),
                    "edges": sum(len(p.depends_on) for p in graph.primitives),
                    "resource_edges": sum(len(p.resource_edges) for p in graph.primitives),
                    "price_s": price_graph(graph, case, speeds) if num_devices <= 1024 else None,
                }
            )
    return rows


def measure_schedules(count: int) -> dict[str, float]:
    """Return how much longer our schedules are than the shortest, where that is found."""
    ratios: list[float] = []
    seed = 10_000
    while len(ratios) < count:
        seed += 1
        rng = random.Random(seed)
        current, target = (random_plan(rng, rng.randint(2, 8)) for _ in range(2))
        memory = memory_for(current, target, LEAST_ROOM + rng.choice([0, 2_000, 20_000, 100_000]))
        graph = plan_transition(current, target, memory)
        if not 4 <= sum(not p.after_commit for p in graph.primitives) <= 20:
            continue
        seconds = random_seconds(graph, rng)
        shortest = shortest_makespan(graph, seconds, limit_s=2.0)
        if shortest:
            ratios.append(makespan(shorten(graph, seconds), seconds) / shortest)
    ratios.sort()
    within = sum(ratio <= 1.05 for ratio in ratios) / count
    return {
        "instances": count,
        "mean": statistics.mean(ratios),
        "p95": ratios[int(0.95 * count)],
        "most": ratios[-1],
        "within 5%": within,
    }


def measure_coordination(kind: str, trials: int) -> dict[str, Any]:
    """Return the shares of trials that reach the target, with the graph and without."""
    together, alone = 0, 0
    for seed in range(trials):
        graph, memory = trial(kind, seed)
        ends = run_in_virtual_time(graph, random.Random(seed))
        together += len(ends) == sum(not p.after_commit for p in graph.primitives)
        alone += HoldAndWait(graph, memory, random.Random(seed)).run()
    return {"kind": kind, "trials": trials, "graph": together / trials, "alone": alone / trials}


if __name__ == "__main__":
    main()
