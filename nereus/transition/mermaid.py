"""A graph as Mermaid text: every primitive with its bytes, or, of large graphs, one box for those of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus.transition.memory import format_bytes
from nereus.transition.primitives import Primitive, TransitionGraph

# More boxes than this can't be read; then those of one model-stage and kind become one.
MOST_BOXES = 40
_COMMIT = "commit"


def to_mermaid(graph: TransitionGraph, seconds: Mapping[str, float] | None = None) -> str:
    """Return a flow chart: solid edges carry state, dashed ones memory, thick ones a set that is read as it is written.

    Args:
        seconds: by id what each primitive took or is expected to take; shown where it is known.
    """
    groups = _groups(graph.primitives)
    number_of = {primitive.id: number for number, group in enumerate(groups) for primitive in group}
    lines = ["flowchart LR"]
    for name in dict.fromkeys(group[0].model_stage for group in groups):
        lines.append(f'  subgraph "{name}"')
        for number, group in enumerate(groups):
            if group[0].model_stage == name:
                lines.append(f'    p{number}["{_label(group, seconds or {})}"]')
        lines.append("  end")
    lines.append(f"  {_COMMIT}([commit])")
    edges: dict[tuple[int, int], str] = {}
    for number, group in enumerate(groups):
        for primitive in group:
            for id in primitive.streams:
                edges[number_of[id], number] = "==>"
            for id in primitive.depends_on:
                arrow = "-.->" if id in primitive.resource_edges else "-->"
                if edges.get((number_of[id], number)) != "-->":
                    edges[number_of[id], number] = arrow
    lines += [f"  p{source} {arrow} p{target}" for (source, target), arrow in edges.items() if source != target]
    followed = {source for source, _ in edges}
    for number, group in enumerate(groups):
        if group[0].after_commit:
            lines.append(f"  {_COMMIT} --> p{number}")
        elif number not in followed:
            lines.append(f"  p{number} --> {_COMMIT}")
    return "\n".join(lines) + "\n"


def _groups(primitives: Sequence[Primitive]) -> list[list[Primitive]]:
    """Return what each box shows."""
    if len(primitives) <= MOST_BOXES:
        return [[primitive] for primitive in primitives]
    groups: dict[tuple[str, str, str, bool], list[Primitive]] = {}
    for primitive in primitives:
        key = (primitive.model_stage, primitive.kind, primitive.transport, primitive.after_commit)
        groups.setdefault(key, []).append(primitive)
    return list(groups.values())


def _label(group: Sequence[Primitive], seconds: Mapping[str, float]) -> str:
    first = group[0]
    parts = [first.kind if len(group) == 1 else f"{len(group)} × {first.kind}"]
    if first.in_place:
        parts[0] += " in place"
    devices = sorted({device for primitive in group for device in primitive.devices})
    parts.append(f"devices {_ranges(devices)}")
    num_bytes = sum(primitive.bytes for primitive in group)
    if num_bytes:
        parts.append(f"{format_bytes(num_bytes)} {first.transport}")
    known = [seconds[primitive.id] for primitive in group if primitive.id in seconds]
    if known:
        parts.append(f"{max(known):.3g} s")
    return "<br/>".join(parts)


def _ranges(devices: Sequence[int]) -> str:
    """Return ids as text, such as `0-3, 8`."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
