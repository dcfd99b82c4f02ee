"""The cost model on real runs: `python -m tests.benchmarks.cost_model [--quick] [--model DIR] [--from FILE]`.

Plans are executed in many settings. The model learns from some of the settings, by the code that a running job learns
with, and predicts the others: latency of a step, memory, and which plan is the fastest, which is then executed too.
Where another one was faster, both are executed again, in turns: the machine may have changed between the two.
Steps in which the system kept a worker waiting for a core are run again (`cost_runs`); the records of all runs are
written beside the table, and `--from` reads them instead of executing anything again. Memory is what the peak is likely
to be, without the margin on top that plans are admitted by.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from nereus.cluster import Link, NodeKind
from nereus.config import load_config
from nereus.controller.adaptation import Adaptation, Surroundings
from nereus.controller.decision import Boundary, Candidate
from nereus.controller.planning import CostPredictor
from nereus.cost.load import StepLoad
from nereus.cost.memory import USABLE_SHARE
from nereus.cost.step import estimate_step
from nereus.plan import Plan
from nereus.runtime.engine import Engine
from nereus.runtime.frame import Frame
from nereus.runtime.job import prepare_job
from nereus.runtime.probe import measure_machine, measure_speeds
from nereus.runtime.session import make_engine
from tests.benchmarks.cost_cases import CostSetting, smollm2_settings, tiny_settings
from tests.benchmarks.cost_runs import execute, read_outcome
from tests.benchmarks.report import DEFAULT_MODEL, OUT_DIR, describe_run, print_table, require_model, write_record

DEVICES = (0, 1)
# How often the chosen plan and the fastest one are executed again.
_DUEL_TURNS = 2
# Goals of the model: mean and largest error of a step's latency, the chosen plan against the best, and memory.
MEAN_ERROR, MAX_ERROR, MOST_REGRET, MEMORY_ERROR = 0.10, 0.25, 0.05, 0.15

Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="SmolLM2 as a Hugging Face directory")
    parser.add_argument("--only", choices=("tiny", "smollm2"), help="one of the two models")
    parser.add_argument("--quick", action="store_true", help="few plans and steps: no numbers to quote")
    parser.add_argument("--json", default=str(OUT_DIR / "cost_model.json"))
    parser.add_argument("--from", dest="source", help="records of an earlier run, as --json has written them")
    options = parser.parse_args(arguments)
    known = json.loads(Path(options.source).read_text())["families"] if options.source else {}
    record: Record = {**describe_run("cost_model", threads=1), "families": {}}
    for name, settings in _families(options.only, quick=options.quick):
        if name == "smollm2":
            require_model(options.model)
        family = record["families"][name] = known.get(name) or run_family(settings, options.model)
        family["summary"] = report(name, family)
        write_record(record, options.json)
    return 0


def _families(only: str | None, *, quick: bool) -> Iterable[tuple[str, tuple[CostSetting, ...]]]:
    for name, settings in (("tiny", tiny_settings()), ("smollm2", smollm2_settings())):
        if only in (None, name):
            few = (settings[0], settings[-1])
            yield name, tuple(replace(one, steps=1) for one in few) if quick else settings


# Execution


def run_family(settings: Sequence[CostSetting], model: str) -> Record:
    """Execute all plans of some settings of one model, those that calibrate first, and what is chosen after them."""
    settings = [_on_model(setting, model) for setting in settings]
    config = load_config(settings[0].recipe, settings[0].overrides)
    with make_engine(config) as engine:
        engine.start(DEVICES)
        kind = _measure(engine, config.precision, config.cluster.memory_per_device)
        runs: list[Record] = []
        duels: dict[str, Record] = {}
        for setting in sorted(settings, key=lambda one: not one.calibrates):
            for name, plan in setting.plans.items():
                runs.append(execute(setting, name, plan, engine))
                _say(runs[-1])
            if not setting.calibrates:
                chosen = _choose(setting, runs, kind)
                runs += _execute_choice(setting, chosen, runs, engine)
                duels |= _compare(setting, chosen, runs, engine)
    return {"kind": kind_record(kind), "runs": runs, "duels": duels}


def _on_model(setting: CostSetting, model: str) -> CostSetting:
    if setting.recipe != "smollm2-135m":
        return setting
    return replace(setting, overrides=(*setting.overrides, f"model.path={os.path.abspath(model)}"))


def _measure(engine: Engine, precision: str, memory_bytes: int) -> NodeKind:
    with tempfile.TemporaryDirectory() as folder:
        speeds = measure_speeds(engine, DEVICES, folder, device_type="cpu")
    return measure_machine(engine, DEVICES, speeds, device_type="cpu", precision=precision, memory_bytes=memory_bytes)


def _choose(setting: CostSetting, runs: Sequence[Record], kind: NodeKind) -> Record:
    """Return the plan that the calibrated model takes for the fastest in a setting."""
    run = next(run for run in runs if run["setting"] == setting.name)
    return Model.learned(runs, kind).choose(run).to_record()


def _execute_choice(setting: CostSetting, chosen: Record, runs: Sequence[Record], engine: Engine) -> list[Record]:
    """Execute the chosen plan, if it wasn't among those executed."""
    if any(run["plan"] == chosen for run in runs if run["setting"] == setting.name):
        return []
    run = execute(setting, "chosen", chosen, engine)
    _say(run)
    return [run]


def _compare(setting: CostSetting, chosen: Record, runs: Sequence[Record], engine: Engine) -> dict[str, Record]:
    """Execute the chosen plan and the fastest one in turns, if they are two; return their seconds under the setting."""
    mine = [run for run in runs if run["setting"] == setting.name]
    best = min(mine, key=lambda run: median(map(step_seconds, run["steps"])))
    if best["plan"] == chosen:
        return {}
    seconds: dict[str, list[float]] = {"chosen": [], "best": []}
    for _ in range(_DUEL_TURNS):
        for which, plan in (("chosen", chosen), ("best", best["plan"])):
            run = execute(setting, f"{which} again", plan, engine)
            _say(run)
            seconds[which] += map(step_seconds, run["steps"])
    return {setting.name: seconds}


def _say(run: Record) -> None:
    times = ", ".join(f"{step['seconds']['total']:.3f}" for step in run["steps"])
    waited = max(step["waited_s"] / step["seconds"]["total"] for step in run["steps"])
    print(f"{run['setting']}, {run['plan_name']}: {times} s (waited for a core {waited:.1%} at most)", flush=True)


def kind_record(kind: NodeKind) -> Record:
    return {
        "peak_flops": dict(kind.peak_flops),
        "memory_bandwidth_bytes_s": kind.memory_bandwidth_bytes_s,
        "intra_node": [kind.intra_node.bandwidth_bytes_s, kind.intra_node.latency_s],
        "storage": [kind.storage.bandwidth_bytes_s, kind.storage.latency_s],
        "memory_bytes": kind.memory_bytes,
    }


# The model


class Model:
    """What a job has learned from the runs of other settings, and what it says of a run."""

    def __init__(self, kind: NodeKind) -> None:
        self._kind = kind
        self._frames: dict[str, Frame] = {}
        self._adaptation: Adaptation | None = None

    @classmethod
    def learned(cls, runs: Iterable[Record], kind: NodeKind) -> Model:
        """Return the model that has seen the runs that calibrate, as control sees the steps of a job."""
        self = cls(kind)
        for run in runs:
            if run["calibrates"]:
                self._learn(run)
        return self

    def _learn(self, run: Record) -> None:
        frame, plan = self.frame(run), Plan.from_record(run["plan"])
        if self._adaptation is None:
            config = load_config(run["recipe"], run["overrides"])
            self._adaptation = frame.begin(plan, config)
            self._adaptation.boundary(0, Surroundings(frame.cluster))
        adaptation = self._adaptation
        for step in run["steps"]:
            adaptation.controller.plan, adaptation.load = plan, frame.spec.load
            adaptation.learn(replace(read_outcome(step["outcome"]), step=0, seconds=step_seconds(step)))

    def frame(self, run: Record) -> Frame:
        """Return the frame of a run's setting, on the machine as it was measured."""
        if run["setting"] not in self._frames:
            job = prepare_job(load_config(run["recipe"], run["overrides"]))
            self._frames[run["setting"]] = job.frame.with_kind(self._kind)
        return self._frames[run["setting"]]

    @property
    def adaptation(self) -> Adaptation:
        assert self._adaptation is not None, "no run calibrates"
        return self._adaptation

    def predict_s(self, run: Record, step: Record) -> float:
        """Return the latency of a step whose lengths are known."""
        frame, load = self.frame(run), self._load(run, step)
        job = replace(frame.spec, load=load, staging=False)  # what is written beside a step is in its tasks' times
        efficiencies = self.adaptation.calibration.efficiencies()
        return estimate_step(Plan.from_record(run["plan"]), job, frame.cluster, efficiencies).total_s

    def predict_bytes(self, run: Record, step: Record) -> dict[int, float]:
        """Return the peak of each device, corrected by the peaks that were measured in other settings."""
        frame, ratio = self.frame(run), self.adaptation.calibration.memory.ratio()
        predictor = CostPredictor(frame.spec, frame.cluster.kind.accelerator, frame.prompt_margin_tokens)
        peaks = predictor.peaks(Plan.from_record(run["plan"]), self._load(run, step))
        return {device: ratio * peak for device, peak in peaks.items()}

    def _load(self, run: Record, step: Record) -> StepLoad:
        """Return the load of a step whose lengths are known."""
        outcome = read_outcome(step["outcome"])
        return replace(
            self.frame(run).spec.load,
            response_tokens=outcome.response_tokens or 0.0,
            response_tokens_p95=max(outcome.response_tokens or 0.0, outcome.response_tokens_p95 or 0.0),
            response_tokens_longest=outcome.response_tokens_longest,
        )

    def choose(self, run: Record) -> Plan:
        """Return the plan that is fastest by prediction in the setting of a run, of all that the planner knows."""
        return self.search(run)[0].plan

    def search(self, run: Record) -> Sequence[Candidate]:
        frame, outcome = self.frame(run), read_outcome(run["steps"][-1]["outcome"])
        load = replace(
            frame.spec.load,
            response_tokens=outcome.response_tokens or 0.0,
            response_tokens_p95=float(outcome.response_tokens_longest or 0.0),
            response_tokens_longest=outcome.response_tokens_longest,
        )
        length = float(frame.cap_tokens) + frame.prompt_margin_tokens
        boundary = Boundary(0, frame.cluster, load, length, memory_factor=self.adaptation.calibration.memory.factor())
        return frame.planning.search(boundary, self.adaptation.calibration.efficiencies(), None)


def step_seconds(step: Record) -> float:
    """Return the seconds of a step, without those between two steps: the benchmark's own work falls into them."""
    seconds: Mapping[str, float] = step["seconds"]
    return seconds["total"] - seconds["transition"] - seconds["orchestration"]


# The table


def report(name: str, family: Record) -> Record:
    """Print what was predicted and measured of one model's runs, and return the numbers that sum it up."""
    runs = family["runs"]
    model = Model.learned(runs, read_kind(family["kind"]))
    rows = [_row(run, model) for run in runs if not run["calibrates"]]
    columns = ("setting", "plan", "measured s", "predicted s", "error %", "peak MiB", "predicted MiB", "error %")
    print_table(f"{name}: plans of settings that the model hasn't seen", columns, [_cells(row) for row in rows],
                num_names=2)  # fmt: skip
    errors = [abs(row["error"]) for row in rows]
    regrets = _regrets(rows, runs, model, family.get("duels", {}))
    print_table(
        f"{name}: the plan chosen by prediction against the best one executed",
        ("setting", "chosen", "best", "chosen s", "best s", "slower by %"),
        [(s, c["plan"], b["plan"], c["measured_s"], b["measured_s"], f"{100 * gap:.1f}") for s, c, b, gap in regrets],
        num_names=3,
    )
    memory = [row["memory_error"] for row in rows]
    summary = {
        "runs": len(rows),
        "mean_error": mean(errors),
        "max_error": max(errors),
        "max_regret": max(gap for *_, gap in regrets),
        "max_memory_error": max(map(abs, memory)),
        "least_memory_error": min(memory),
    }
    _print_summary(name, summary)
    return summary


def read_kind(record: Record) -> NodeKind:
    link = Link(*record["intra_node"])
    return NodeKind(
        name="this host",
        devices=len(DEVICES),
        memory_bytes=record["memory_bytes"],
        peak_flops=record["peak_flops"],
        memory_bandwidth_bytes_s=record["memory_bandwidth_bytes_s"],
        intra_node=link,
        inter_node=link,
        storage=Link(*record["storage"]),
    )


def _row(run: Record, model: Model) -> Record:
    """Return a run's medians; each step is predicted with its own lengths."""
    errors = [model.predict_s(run, step) / step_seconds(step) - 1 for step in run["steps"]]
    measured_s, error = median(map(step_seconds, run["steps"])), median(errors)
    last = run["steps"][-1]
    all_peaks = [step["outcome"]["peak_bytes"] for step in run["steps"]]
    peaks = {device: median(peak[device] for peak in all_peaks) for device in all_peaks[0]}
    fullest = max(peaks, key=lambda device: peaks[device])
    predicted = model.predict_bytes(run, last)[int(fullest)]
    return {
        "setting": run["setting"],
        "plan": run["plan_name"],
        "measured_s": measured_s,
        "predicted_s": measured_s * (1 + error),
        "error": error,
        "peak_bytes": peaks[fullest],
        "predicted_bytes": predicted,
        "memory_error": predicted / peaks[fullest] - 1,
    }


def _cells(row: Record) -> tuple[Any, ...]:
    return (
        row["setting"],
        row["plan"],
        row["measured_s"],
        row["predicted_s"],
        f"{100 * row['error']:+.1f}",
        row["peak_bytes"] / 2**20,
        row["predicted_bytes"] / 2**20,
        f"{100 * row['memory_error']:+.1f}",
    )


def _regrets(
    rows: Sequence[Record], runs: Sequence[Record], model: Model, duels: Mapping[str, Record]
) -> list[tuple[str, Record, Record, float]]:
    """Return by setting the row of the chosen plan and of the best, and by how much the former was slower.

    Where they were executed again in turns, these seconds count.
    """
    result = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [row for row in rows if row["setting"] == setting]
        chosen = next((row for row in mine if row["plan"] == "chosen"), None)
        if chosen is None:  # it was among the plans that were executed anyway
            plan = model.choose(next(run for run in runs if run["setting"] == setting)).to_record()
            same = [run["plan_name"] for run in runs if run["setting"] == setting and run["plan"] == plan]
            name = same[0] if same else min(mine, key=lambda row: row["predicted_s"])["plan"]
            chosen = next(row for row in mine if row["plan"] == name)
        best = min(mine, key=lambda row: row["measured_s"])
        if setting in duels:
            chosen, best = (
                {**row, "measured_s": median(duels[setting][which])}
                for row, which in ((chosen, "chosen"), (best, "best"))
            )
        result.append((setting, chosen, best, chosen["measured_s"] / best["measured_s"] - 1))
    return result


def _print_summary(name: str, summary: Record) -> None:
    def verdict(is_met: bool) -> str:
        return "as wanted" if is_met else "NOT as wanted"

    headroom = 1 - USABLE_SHARE
    print(
        f"{name}, {summary['runs']} runs: error of step latency {summary['mean_error']:.1%} in the mean "
        f"({verdict(summary['mean_error'] < MEAN_ERROR)}), {summary['max_error']:.1%} at most "
        f"({verdict(summary['max_error'] < MAX_ERROR)}); chosen plans up to {summary['max_regret']:.1%} slower than "
        f"the best ({verdict(summary['max_regret'] <= MOST_REGRET)}); memory off by {summary['max_memory_error']:.1%} "
        f"at most ({verdict(summary['max_memory_error'] <= MEMORY_ERROR)}), too little by "
        f"{max(0.0, -summary['least_memory_error']):.1%} at most "
        f"({verdict(-summary['least_memory_error'] <= headroom)})",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
