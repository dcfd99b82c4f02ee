"""How long the planner takes to decide, how much memory it takes for it, and how it stands against a solver.

    python -m tests.benchmarks.planner [--quick] [--json FILE]

Decisions: Llama-3.1-8B, five model-stages, on the cluster with the most devices, each decision with other lengths than
the one before, as at a replan. Solver: HiGHS on the same instances as a mixed-integer program, small enough for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from nereus.catalog import cluster_preset
from nereus.cost.efficiency import CONSERVATIVE
from nereus.cost.load import StepLoad
from nereus.cost.step import JobSpec
from nereus.planner import Setting, best_plans, refit_plan
from nereus.planner.search import find_plans
from nereus.planner.space import layouts_for
from nereus.presets import model_preset
from tests.benchmarks.report import describe_run, print_table, write_record
from tests.planner.instances import random_setting
from tests.planner.milp import PlanProgram

CLUSTERS = ((16, "a100-64gb-hdr"), (32, "a100-64gb-hdr"), (128, "a100-64gb-hdr"), (1024, "mi250x-slingshot"),
            (16384, "mi250x-slingshot"))  # fmt: skip
LENGTHS = (1147.5, 2000.0, 3722.0)
GOALS_MS = {32: 10, 1024: 150, 16384: 3000}
# Seeds of random instances with a feasible plan, and their devices.
INSTANCES = ((4, 4), (5, 5), (1007, 6), (1042, 6), (1026, 7), (1049, 8))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", help="taken for the sake of the other benchmarks")
    parser.add_argument("--json", default="build/bench/planner.json")
    options = parser.parse_args(arguments)
    decisions = [measure_decisions(num, preset, options.quick) for num, preset in CLUSTERS]
    print_table(
        "Decision: best plan of Llama-3.1-8B PPO; milliseconds",
        ("devices", "median", "most", "CPU", "goal", "refit", "peak MB"),
        [tuple(row.values()) for row in decisions],
    )
    solved = [measure_solver(seed, num) for seed, num in (INSTANCES[:2] if options.quick else INSTANCES)]
    print_table(
        "Beside HiGHS, gap 0.1%",
        ("devices", "columns", "planner ms", "solver ms", "times", "step s", "solver's", "bound"),
        [tuple(row.values()) for row in solved],
    )
    record = {**describe_run("planner", threads=1), "decisions": decisions, "solver": solved}
    write_record(record, options.json)


def _setting(num_devices: int, preset: str, response_tokens: float) -> Setting:
    spec = model_preset("llama-3.1-8b")
    specs = {
        "actor.generation": spec,
        "actor.training": spec,
        "critic.training": replace(spec, head="value"),
        "reference.inference": spec,
        "reward.inference": replace(spec, head="score"),
    }
    load = StepLoad(1024, 4, 512, response_tokens, 1.15 * response_tokens)
    return Setting.of(JobSpec(specs, load), cluster_preset(preset, num_devices), CONSERVATIVE)


def measure_decisions(num_devices: int, preset: str, quick: bool) -> dict[str, Any]:
    """Return milliseconds of decisions with ever other lengths, in wall and CPU time, and the peak memory of one."""
    plan = best_plans(_setting(num_devices, preset, 1000.0), 1)[0].plan
    walls, cpus, refits = [], [], []
    for repeat in range(1 if quick else 7):
        for length in LENGTHS:
            setting = _setting(num_devices, preset, length + repeat)
            wall, cpu = time.perf_counter(), time.process_time()
            best_plans(setting, 1)
            walls.append(1e3 * (time.perf_counter() - wall))
            cpus.append(1e3 * (time.process_time() - cpu))
            setting = _setting(num_devices, preset, 1000.0 + repeat)
            wall = time.perf_counter()
            refit_plan(plan, setting)
            refits.append(1e3 * (time.perf_counter() - wall))
    tracemalloc.start()
    best_plans(_setting(num_devices, preset, LENGTHS[-1] - 1), 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "devices": num_devices,
        "median_ms": statistics.median(walls),
        "most_ms": max(walls),
        "cpu_ms": statistics.median(cpus),
        "goal_ms": GOALS_MS.get(num_devices),
        "refit_ms": statistics.median(refits),
        "peak_mb": peak / 1e6,
    }


def measure_solver(seed: int, num_devices: int) -> dict[str, Any]:
    """Return what planner and solver take for one random instance, and what they find."""
    setting = random_setting(seed, least_devices=num_devices, most_devices=num_devices)
    layouts = {name: layouts_for(spec, num_devices) for name, spec in setting.job.specs.items()}
    find_plans(setting, layouts, 1)
    begin = time.perf_counter()
    found = find_plans(setting, layouts, 1)
    planner_s = time.perf_counter() - begin
    program = PlanProgram(setting)
    begin = time.perf_counter()
    solved_s, bound_s = program.solve(time_limit_s=120)
    solver_s = time.perf_counter() - begin
    return {
        "devices": num_devices,
        "columns": sum(len(group) for group in program.groups),
        "planner_ms": 1e3 * planner_s,
        "solver_ms": 1e3 * solver_s,
        "times": solver_s / planner_s,
        "step_s": found[0].work_s if found else None,
        "solver_step_s": solved_s if found else None,
        "bound_s": bound_s if found else None,
    }


if __name__ == "__main__":
    main()
