"""The shortest possible schedule of a graph's primitives under memory, found by OR-Tools' CP-SAT."""

from __future__ import annotations

from collections.abc import Mapping

from ortools.sat.python import cp_model

from nereus.transition.primitives import TransitionGraph


def shortest_makespan(graph: TransitionGraph, seconds: Mapping[str, int], *, limit_s: float = 20.0) -> int | None:
    """Return the shortest makespan, or None when it wasn't proven in time.

    State edges hold, and devices take part in one primitive at a time; who waits for whose memory is free.

    Args:
        seconds: whole units of time, by id.
    """
    model = cp_model.CpModel()
    primitives = [p for p in graph.primitives if not p.after_commit]
    horizon = sum(seconds[p.id] for p in primitives)
    start = {p.id: model.new_int_var(0, horizon, f"start {p.id}") for p in primitives}
    end = {p.id: model.new_int_var(0, horizon, f"end {p.id}") for p in primitives}
    by_device: dict[int, list[cp_model.IntervalVar]] = {}
    for p in primitives:
        if p.streams:  # it may be drawn out until its stage has ended
            size = model.new_int_var(seconds[p.id], horizon, f"size {p.id}")
        else:
            size = seconds[p.id]
        interval = model.new_interval_var(start[p.id], size, end[p.id], p.id)
        for id in p.streams:
            model.add(end[p.id] >= end[id])
            model.add(start[p.id] >= start[id])
        for id in set(p.depends_on) - set(p.resource_edges):
            model.add(start[p.id] >= end[id])
        if p.kind not in ("stage", "destroy"):
            for device in p.devices:
                by_device.setdefault(device, []).append(interval)
    for intervals in by_device.values():
        model.add_no_overlap(intervals)
    for device, free in graph.free_bytes.items():
        times, changes = [], []
        for p in primitives:
            peak, held = p.memory.get(device, (0, 0))
            if peak:
                times.append(start[p.id])
                changes.append(-peak)
            if peak != held:
                times.append(end[p.id])
                changes.append(peak - held)
        if times:
            model.add_reservoir_constraint(times, changes, -free, 2**50)
    makespan = model.new_int_var(0, horizon, "makespan")
    model.add_max_equality(makespan, list(end.values()) or [model.new_constant(0)])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    return int(solver.objective_value) if status == cp_model.OPTIMAL else None
