"""Why a plan is worse than the best one, and why one doesn't fit: in a sentence, with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nereus.cost.memory import MemoryPeak, estimate_memory
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan, stage_of
from nereus.planner.candidate import Candidate
from nereus.planner.setting import Setting

GIB = 2**30
# Seconds by class below this share of a step aren't worth naming.
_WORTH_NAMING = 1e-3


def why_worse(candidate: Candidate, best: Candidate) -> str:
    """Return why a plan's step takes longer: what differs, the stage that loses most, and the operations behind it."""
    more = candidate.step_s - best.step_s
    share = 100 * more / best.step_s
    losses = {stage: seconds - best.cost.stages_s[stage] for stage, seconds in candidate.cost.stages_s.items()}
    stage, most = max(losses.items(), key=lambda item: item[1])
    if most <= 0:
        others = [name for name in candidate.plan if candidate.plan[name].layout != best.plan[name].layout]
        return f"+{share:.1f}%: as fast; {', '.join(others)} planned otherwise"
    gains = {name: -loss for name, loss in losses.items() if loss < -_WORTH_NAMING * best.step_s}
    text = f"+{share:.1f}%: {_stage_name(stage)} takes {_seconds(most)} longer"
    cause = _cause(candidate, best, stage)
    text += f" ({cause})" if cause else ""
    if gains:
        name, gain = max(gains.items(), key=lambda item: item[1])
        text += f", though {_stage_name(name)} is {_seconds(gain)} shorter"
    return text


def _cause(candidate: Candidate, best: Candidate, stage: str) -> str:
    """Return which model-stage of a stage is planned otherwise, and which class of operations costs most more."""
    names = [f"{name}/{stage}" for name in candidate.plan if f"{name}/{stage}" in candidate.cost.model_stages_s]
    if not names:
        return ""
    longer = {name: candidate.cost.model_stages_s[name] - best.cost.model_stages_s[name] for name in names}
    key = max(longer, key=lambda name: longer[name])
    name = key.split("/")[0]
    here, there = candidate.plan[name], best.plan[name]
    if longer[key] <= _WORTH_NAMING * best.step_s:
        return (
            "its model-stages share devices that they don't share in the best plan" if _moved(candidate, best) else ""
        )
    planned = f"{name} {_shape(here)} instead of {_shape(there)}"
    if _shape(here) == _shape(there):
        planned = f"{name} on other devices"
    classes, others = candidate.cost.classes_s[key], best.cost.classes_s[key]
    more = {cls: seconds - others.get(cls, 0.0) for cls, seconds in classes.items()}
    cls, extra = max(more.items(), key=lambda item: item[1])
    return f"{planned}: {_seconds(extra)} more of {cls}" if extra > 0 else planned


def _moved(candidate: Candidate, best: Candidate) -> bool:
    return any(candidate.plan[name].devices != best.plan[name].devices for name in candidate.plan)


def _shape(stage: StagePlan) -> str:
    again = ", recomputing" if stage.recompute else ""
    return f"{stage.dp}x{stage.layout.tp}x{stage.layout.pp} (micro-batch {stage.micro_batch}{again})"


def _stage_name(stage: str) -> str:
    return stage.replace("_", " ")


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def leanest(plan: Plan) -> Plan:
    """Return a plan with micro-batches of 1 and recomputation: nothing needs less memory in its place."""
    return Plan.of(
        {name: replace(s, micro_batch=1, recompute=stage_of(name) == "training") for name, s in plan.items()}
    )


def worst_peak(plan: Plan, setting: Setting) -> MemoryPeak:
    """Return the peak of the device that lacks most memory, corrected by measured ones."""
    peaks = estimate_memory(plan, setting.job.specs, setting.workload, setting.job.precision)
    capacities = setting.cluster.capacities
    peak = max(peaks.values(), key=lambda each: each.total / capacities[each.device])
    kinds = {kind: int(count * setting.memory_factor) for kind, count in peak.kinds.items()}
    return MemoryPeak(peak.device, peak.phase, kinds)


def why_misfit(plan: Plan, setting: Setting) -> str:
    """Return why a plan that doesn't fit even with the leanest choices doesn't."""
    peak = worst_peak(leanest(plan), setting)
    usable = setting.usable_share * setting.cluster.memory_bytes(peak.device)
    largest = sorted(peak.kinds.items(), key=lambda item: -item[1])[:3]
    kinds = ", ".join(f"{kind} {count / GIB:.1f}" for kind, count in largest)
    return (
        f"{peak.phase} needs {peak.total / GIB:.1f} GiB on device {peak.device} even with micro-batch 1 and "
        f"recomputation ({kinds}), and {usable / GIB:.1f} GiB are usable"
    )


def no_plan_message(setting: Setting, layouts: Mapping[str, tuple[Layout, ...]]) -> str:
    """Return a sentence for when nothing fits, with the numbers of the plan that cuts every model the most."""
    ids, stages = setting.cluster.device_ids, {}
    for name, each in layouts.items():
        layout = max(each, key=lambda one: (one.size, one.tp), default=Layout())
        stages[name] = StagePlan(1, layout, ids[: layout.size], 1)
    num, gib = len(ids), setting.cluster.kind.memory_bytes / GIB
    return (
        f"No plan fits {num} device{'s' if num > 1 else ''} of {gib:.1f} GiB ({setting.cluster.kind.name}): with every "
        f"model cut the most, {why_misfit(Plan.of(stages), setting)}; use more devices, a smaller model or shorter "
        "responses."
    )
