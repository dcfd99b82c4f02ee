"""What each plan of a run took against what was predicted, and what the run would have taken on its first plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

Metrics = Mapping[str, Any]


@dataclass
class PlanStretch:
    """The steps that ran on one plan; micro-batches and recomputation may have differed."""

    plan: str
    steps: list[int] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    predicted_s: list[float | None] = field(default_factory=list)

    @property
    def mean_s(self) -> float:
        """Mean seconds of a step, transitions not included; where steps have a prediction, of these."""
        return fmean([seconds for seconds, _ in self._pairs] or self.measured_s)

    @property
    def mean_predicted_s(self) -> float | None:
        """Mean of what was predicted, of the same steps: a run's first one has no prediction."""
        return fmean(predicted for _, predicted in self._pairs) if self._pairs else None

    @property
    def error(self) -> float | None:
        """Mean of |predicted / measured - 1| over the steps that have a prediction."""
        errors = [abs(predicted / measured - 1) for measured, predicted in self._pairs if measured > 0]
        return fmean(errors) if errors else None

    @property
    def _pairs(self) -> list[tuple[float, float]]:
        """Seconds measured and predicted, of the steps that have both."""
        both = zip(self.measured_s, self.predicted_s, strict=True)
        return [(measured, predicted) for measured, predicted in both if predicted is not None]


def split_by_plan(history: Sequence[Metrics]) -> list[PlanStretch]:
    """Return the plans of a run in the order in which they first ran, each with all its steps."""
    found: dict[str, PlanStretch] = {}
    for line in history:
        plan = describe_plan(line.get("plan", {}))
        stretch = found.setdefault(plan, PlanStretch(plan))
        stretch.steps.append(line["step"])
        stretch.measured_s.append(step_seconds(line))
        stretch.predicted_s.append(line.get("predicted_s", {}).get("current"))
    return list(found.values())


@dataclass(frozen=True)
class FirstPlan:
    """A run against its first plan, over the steps that this one could have run.

    Its seconds are predicted: of each step, what was measured times what the cost model, as it was calibrated until
    then, says of the first plan over what it says of the plan in force. The first step ran on the first plan, before
    anything was calibrated: it counts as measured.

    Attributes:
        steps: those steps.
        measured_s: what they took as they ran, transitions before them included.
        first_plan_s: by step what they would have taken; None at steps that it could not have run.
        outgrown_at: the first step at which it no longer fits memory.
        without_devices: steps at which devices that it needs weren't there.
    """

    steps: tuple[int, ...]
    measured_s: float
    first_plan_s: tuple[float | None, ...]
    outgrown_at: int | None
    without_devices: tuple[int, ...]

    @property
    def total_s(self) -> float:
        return sum(seconds for seconds in self.first_plan_s if seconds is not None)


def compare_with_first_plan(history: Sequence[Metrics]) -> FirstPlan | None:
    """Return what a run would have taken on its first plan; None where nothing was predicted."""
    if not any(line.get("predicted_s") for line in history):
        return None
    needed = devices_of(history[0].get("plan", {}))
    steps, measured, seconds, without = [], 0.0, [], []
    outgrown_at = None
    for line in history:
        lacks_devices = bool(needed - set(line.get("devices_present", needed)))
        first_plan_s = None if lacks_devices else _first_plan_seconds(line, history[0])
        seconds.append(first_plan_s)
        if first_plan_s is not None:
            steps.append(line["step"])
            measured += line["seconds"]["total"]
        elif lacks_devices:
            without.append(line["step"])
        elif outgrown_at is None and line.get("predicted_s", {}).get("initial", 0.0) is None:
            outgrown_at = line["step"]
    return FirstPlan(tuple(steps), measured, tuple(seconds), outgrown_at, tuple(without))


def describe_first_plan(compared: FirstPlan) -> str:
    """Return the comparison in words, what is predicted labelled so."""
    if not compared.steps:
        text = "The first plan could have run none of the steps."
    else:
        ratio = compared.total_s / compared.measured_s
        text = (
            f"Steps {describe_ranges(compared.steps)} took {compared.measured_s:.1f} s, changes of the plan included; "
            f"on the first plan they would have taken {compared.total_s:.1f} s (predicted), {ratio:.2f} times as long."
        )
    if compared.without_devices:
        count = len(compared.without_devices)
        text += f" Its devices were not all there at {count} step{'' if count == 1 else 's'}."
    if compared.outgrown_at is not None:
        text += f" From step {compared.outgrown_at} on it no longer fits memory (predicted)."
    return text


def step_seconds(line: Metrics) -> float:
    """Return the seconds of a step without those of a change of the plan before it."""
    seconds = line.get("seconds", {})
    return seconds.get("total", 0.0) - seconds.get("transition", 0.0)


def describe_plan(record: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a plan in words, model-stages of one kind together: `actor.generation 1x2x1 on 0-1; all others ...`.

    Numbers are dp x tp x pp, as in `Plan.describe`, which names each model-stage and device.
    """
    if not record:
        return "not known"
    groups = group_by_text({name: describe_stage(entry) for name, entry in record.items()})
    if len(groups) == 1:
        return f"all model-stages {next(iter(groups))}"
    largest = max(groups, key=lambda text: len(groups[text]))
    parts = [f"{', '.join(names)} {text}" for text, names in groups.items() if len(names) == 1 or text != largest]
    return "; ".join(parts + ([f"all others {largest}"] if len(groups[largest]) > 1 else []))


def describe_stage(entry: Mapping[str, Any]) -> str:
    """Return where a model-stage runs, such as `2x1x1 on 0-1` (dp x tp x pp)."""
    return f"{entry['dp']}x{entry['tp']}x{entry['pp']} on {describe_ids(entry.get('devices', ()))}"


def group_by_text(texts: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the names that share each text, in the order of the texts."""
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        groups.setdefault(text, []).append(name)
    return groups


def describe_ids(ids: Sequence[int]) -> str:
    """Return device ids in their order: two as `0,1`, more in a row as `0-7`."""
    return describe_ranges(ids, most=6) if len(ids) > 2 else ",".join(map(str, ids))


def devices_of(record: Mapping[str, Mapping[str, Any]]) -> set[int]:
    """Return all devices that a plan's record uses."""
    return {device for entry in record.values() for device in entry.get("devices", ())}


def describe_ranges(numbers: Sequence[int], most: int = 4) -> str:
    """Return whole numbers as ranges, such as `0-7, 9`; of many ranges the first and how many there are more."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")


def _first_plan_seconds(line: Metrics, first: Metrics) -> float | None:
    if line is first and "predicted_s" not in line:  # before it nothing was known
        return step_seconds(line)
    predicted = line.get("predicted_s", {})
    current, initial = predicted.get("current"), predicted.get("initial")
    return step_seconds(line) * initial / current if current and initial is not None else None
