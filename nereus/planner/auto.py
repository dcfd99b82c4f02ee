"""From what the config says of the plan, or from nothing, to a whole plan that is legal and, if it can, fits memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nereus.cost.memory import Precision, Workload, check_memory, fits, kv_slots, overflow_bytes, room_by_rank
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan, check_plan, stage_of


def plan_auto(
    specs: Mapping[str, ModelSpec],
    capacities: Mapping[int, int],
    workload: Workload,
    precision: Precision,
    *,
    micro_batch: int | None = None,
) -> Plan:
    """Return the plan with every model-stage on all devices that fits memory with the fewest pipeline stages.

    Tried in turn are tp = 1, pp = 1, 2, 4, ... with dp = devices // pp, at most the samples there are to share.

    Args:
        specs: the run's model-stages and their models.
        capacities: bytes of memory by device id, in the cluster's order.
        micro_batch: most samples of a packed micro-batch; None picks the largest that fits.

    Raises:
        ValueError: none fits; the message is that of the one with the most pipeline stages.
    """
    devices = tuple(capacities)
    most_stages = min(len(devices), *(spec.layers for spec in specs.values()))
    plan = _spread(specs, devices, 1, workload)
    for pp in _powers_of_two(most_stages):
        plan = _spread(specs, devices, pp, workload)
        for name in plan:
            choices = _choices(name, plan[name], workload, micro_batch, may_recompute=True)
            plan = _choose(name, choices, plan, specs, workload, precision, capacities)
        if fits(plan, specs, workload, precision, capacities):
            return plan
    check_memory(plan, specs, workload, precision, capacities)
    raise AssertionError("a plan that doesn't fit passed the memory check")


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def _spread(specs: Mapping[str, ModelSpec], devices: Sequence[int], pp: int, workload: Workload) -> Plan:
    stages = {}
    for name in specs:
        dp = min(len(devices) // pp, _most_replicas(name, workload))
        stages[name] = StagePlan(dp, Layout(1, pp), tuple(devices[: dp * pp]), micro_batch=1)
    return Plan.of(stages)


def _most_replicas(model_stage: str, workload: Workload) -> int:
    training = stage_of(model_stage) == "training"
    return workload.smallest_minibatch_samples if training else workload.samples_per_step


def resolve_plan(
    entries: Mapping[str, Mapping[str, Any]],
    specs: Mapping[str, ModelSpec],
    capacities: Mapping[int, int],
    workload: Workload,
    precision: Precision,
    *,
    micro_batch: int | None = None,
) -> Plan:
    """Return a plan given by hand with its defaults filled in.

    Args:
        entries: per model-stage some of dp, tp, pp (default 1), devices (default: ids from 0), micro_batch and
            recompute (default false); a None is a default too.
        capacities: bytes of memory by device id; these are the devices there are.
        micro_batch: for entries that name none. None picks the largest that fits memory. It doesn't bind generation,
            whose micro-batch is the number of sequences in flight: as many as fit unless the entry says so.

    Raises:
        ValueError: the plan is illegal. Whether it fits memory is `check_memory`'s to say.
    """
    plan = Plan.of({name: _stage_plan(entry) for name, entry in entries.items()})
    check_plan(
        plan,
        specs,
        tuple(capacities),
        samples_per_step=workload.samples_per_step,
        minibatch_samples=workload.smallest_minibatch_samples,
    )
    for name, entry in entries.items():
        if entry.get("micro_batch") is None:
            choices = _choices(name, plan[name], workload, micro_batch, may_recompute=False)
            plan = _choose(name, choices, plan, specs, workload, precision, capacities)
    return plan


def _stage_plan(entry: Mapping[str, Any]) -> StagePlan:
    def get(key: str, default: Any) -> Any:
        value = entry.get(key)
        return default if value is None else value

    dp, layout = get("dp", 1), Layout(get("tp", 1), get("pp", 1))
    devices = tuple(get("devices", range(max(0, dp * layout.size))))
    return StagePlan(dp, layout, devices, get("micro_batch", 1), bool(get("recompute", False)))


def _choices(
    name: str, stage: StagePlan, workload: Workload, micro_batch: int | None, *, may_recompute: bool
) -> Iterator[StagePlan]:
    """Yield the micro-batches to try, largest first, then for training the same with recomputation if it may be used.

    The largest is the replica's share of the samples; through pp pipeline stages, a pp-th of it, so that they fill.
    """
    first = -(-workload.share(name, stage.dp) // stage.layout.pp) if micro_batch is None else micro_batch
    both = may_recompute and stage_of(name) == "training"
    for recompute in (False, True) if both else (stage.recompute,):
        samples = first
        while samples:
            yield replace(stage, micro_batch=samples, recompute=recompute)
            samples = samples // 2 if micro_batch is None else 0


def _choose(
    name: str,
    choices: Iterator[StagePlan],
    plan: Plan,
    specs: Mapping[str, ModelSpec],
    workload: Workload,
    precision: Precision,
    capacities: Mapping[int, int],
) -> Plan:
    """Return the plan with the first choice for a model-stage that fits, or the least hungry one where none does.

    A device runs one model-stage at a time and holds what is resident of all, which no micro-batch changes: so each
    model-stage's choice is independent of the others'. In generation a micro-batch is the number of sequences in
    flight, which costs no extra pass: as many as fit.
    """
    if stage_of(name) == "generation":
        slots = kv_slots(plan, specs, workload, precision, capacities)
        return plan.with_stage(name, micro_batch=max(1, slots))
    room = room_by_rank(name, plan, specs, workload, precision, capacities)
    best, least = plan[name], None
    for stage in choices:
        overflow = max(0, overflow_bytes(room, name, stage, specs[name], workload, precision))
        if least is None or overflow < least:
            best, least = stage, overflow
        if overflow == 0:
            break
    return plan.with_stage(name, micro_batch=best.micro_batch, recompute=best.recompute)
