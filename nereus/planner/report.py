"""A search as people read it: tables of the best plan, its time and memory, the runners-up and what doesn't fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.table import Table

from nereus.cost.memory import MemoryPeak
from nereus.cost.rank_memory import KINDS
from nereus.plan import Plan
from nereus.planner.candidate import Candidate, Search

GIB = 2**30
# Kinds of devices in the memory table.
_MOST_GROUPS = 5


def search_record(search: Search) -> dict[str, Any]:
    """Return what `nereus plan --json` prints; times in seconds, memory in bytes at each device's peak."""
    best = search.best
    return {
        "best": {
            "plan": best.plan.to_record(),
            "step_s": best.step_s,
            "stages_s": dict(best.cost.stages_s),
            "memory_bytes": {str(device): dict(peak.kinds) for device, peak in best.peaks.items()},
        },
        "runners_up": [
            {"plan": each.plan.to_record(), "step_s": each.step_s, "why": each.why} for each in search.runners_up
        ],
        "infeasible": [{"plan": plan.to_record(), "why": why} for plan, why in search.infeasible],
    }


def search_tables(search: Search) -> Iterator[Table]:
    """Yield the tables that `nereus plan` prints."""
    yield _plan_table(search.best)
    yield _time_table(search.best)
    yield _memory_table(search.best)
    if search.runners_up:
        rows = [(f"{each.step_s:.1f}", describe_layouts(each.plan), each.why) for each in search.runners_up]
        yield _table("Next best, by layouts", ["step s", "dp x tp x pp", "why it is worse"], rows, right=(0,))
    if search.infeasible:
        misfits = [(describe_layouts(plan), why) for plan, why in search.infeasible]
        yield _table("Faster, but they don't fit", ["dp x tp x pp", "why not"], misfits)


def describe_layouts(plan: Plan) -> str:
    """Return a line a model-stage: `actor.training 4x2x2 on 0-15`."""
    return "\n".join(
        f"{name} {s.dp}x{s.layout.tp}x{s.layout.pp} on {device_ranges(s.devices)}" for name, s in plan.items()
    )


def device_ranges(devices: Sequence[int]) -> str:
    """Return ids such as `0-15, 20`."""
    parts: list[list[int]] = []
    for device in sorted(devices):
        if parts and device == parts[-1][1] + 1:
            parts[-1][1] = device
        else:
            parts.append([device, device])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _plan_table(best: Candidate) -> Table:
    rows = []
    for name, stage in best.plan.items():
        seconds = {
            key.split("/")[1]: value for key, value in best.cost.model_stages_s.items() if key.startswith(f"{name}/")
        }
        rows.append(
            (
                name,
                str(stage.dp),
                str(stage.layout.tp),
                str(stage.layout.pp),
                device_ranges(stage.devices),
                str(stage.micro_batch),
                "yes" if stage.recompute else "",
                ", ".join(f"{phase} {value:.1f}" for phase, value in seconds.items()),
            )
        )
    headings = ["model-stage", "dp", "tp", "pp", "devices", "micro-batch", "recompute", "seconds"]
    return _table(f"Best plan: {best.step_s:.1f} s a step", headings, rows, right=(1, 2, 3, 5))


def _time_table(best: Candidate) -> Table:
    """Return seconds by stage, and for each the model-stages and operations that take most of it."""
    rows = []
    for stage, seconds in best.cost.stages_s.items():
        if seconds > 0:
            share = 100 * seconds / best.cost.total_s
            rows.append((stage.replace("_", " "), f"{seconds:.1f}", f"{share:.0f}%", _dominant(best, stage, seconds)))
    return _table("Where the time goes", ["stage", "s", "share", "most of it"], rows, right=(1, 2))


def _dominant(best: Candidate, stage: str, stage_s: float) -> str:
    parts = []
    for key, classes in best.cost.classes_s.items():
        if key == stage or key.endswith(f"/{stage}"):
            name = key.split("/")[0] if "/" in key else ""
            largest = sorted(classes.items(), key=lambda item: -item[1])[:2]
            shown = ", ".join(f"{cls} {seconds:.1f}" for cls, seconds in largest if seconds >= 0.02 * stage_s)
            parts.append(f"{name}: {shown}" if name else shown)
    return "; ".join(part for part in parts if part and not part.endswith(": "))


def _memory_table(best: Candidate) -> Table:
    """Return the peaks of the fullest kinds of devices in GiB against what may be used, by kind of memory."""
    setting, groups = best.setting, _alike(best.peaks.values())
    groups.sort(key=lambda group: -group[1].total / setting.cluster.memory_bytes(group[1].device))
    shown = groups[:_MOST_GROUPS]
    rows: list[list[str]] = []
    for kind in KINDS:
        if any(peak.kinds.get(kind, 0) >= GIB / 20 for _, peak in shown):
            rows.append([kind, *(f"{peak.kinds.get(kind, 0) / GIB:.1f}" for _, peak in shown)])
    if setting.memory_factor != 1.0:
        rows.append(["measured / predicted", *(f"{setting.memory_factor:.2f}" for _ in shown)])
    rows.append(["peak", *(f"{peak.total * setting.memory_factor / GIB:.1f}" for _, peak in shown)])
    usable = [setting.usable_share * setting.cluster.memory_bytes(peak.device) for _, peak in shown]
    rows.append(["may be used", *(f"{num_bytes / GIB:.1f}" for num_bytes in usable)])
    rows.append(["peak is in", *(_short_phase(peak.phase) for _, peak in shown)])
    title = "Memory at the peak, GiB"
    if len(groups) > len(shown):
        title += f" ({sum(len(devices) for devices, _ in groups[len(shown) :])} devices that are less full left out)"
    headings = ["devices", *(_some_ranges(devices) for devices, _ in shown)]
    return _table(title, headings, rows, right=range(1, len(headings)))


def _some_ranges(devices: Sequence[int]) -> str:
    """Return ids such as `0-1, 4-5, ... (12 devices)`."""
    parts = device_ranges(devices).split(", ")
    return ", ".join(parts) if len(parts) <= 2 else f"{parts[0]}, {parts[1]}, ... ({len(devices)} devices)"


def _short_phase(phase: str) -> str:
    """Return `actor training` of `training of actor.training`."""
    stage, _, name = phase.partition(" of ")
    return f"{name.split('.')[0]} {stage}" if name else phase


def _alike(peaks: Iterable[MemoryPeak]) -> list[tuple[list[int], MemoryPeak]]:
    """Return devices grouped by peaks that look the same in a table."""
    groups: dict[tuple[Any, ...], tuple[list[int], MemoryPeak]] = {}
    for peak in peaks:
        key = (peak.phase, *(round(count / GIB, 1) for _, count in sorted(peak.kinds.items())))
        groups.setdefault(key, ([], peak))[0].append(peak.device)
    return list(groups.values())
