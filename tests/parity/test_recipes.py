"""The recipes that adapt train what a run of theirs on one plan trains: in float64, with their devices and memory."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import nereus.runtime.session as session_module
from nereus.config import RunConfig, build_config
from nereus.cost.calibration import Calibration
from nereus.runtime.engine import Engine
from nereus.runtime.local import LocalEngine
from nereus.runtime.session import Session
from storage.records import read_records
from tests.parity.runs import uniform_plan
from tests.parity.test_adaptation import Adapted
from tests.parity.test_transitions import STAGES, assert_same, read_whole_state
from tests.runtime.steps import drive

pytestmark = pytest.mark.long

RECIPES = Path(session_module.__file__).parents[1] / "recipes"
# Numbers of twice the size need more memory to be as short of it.
ADAPT_CPU: dict[str, Any] = {"memory_per_device": "116MiB"}
ADAPT_4: dict[str, Any] = {"memory_per_device": "180MiB"}
# All the changes of devices in half the steps.
FEW_STEPS, FAST_DRIFT = 8, [[0, 4], [2, 2], [4, 3], [6, 4]]


def make_engine(config: RunConfig) -> Engine:
    return LocalEngine(
        "tests.runtime.open_rank:OpenRank",
        threads_per_device=config.cluster.threads_per_device,
        memory_per_device_bytes=config.cluster.memory_per_device,
    )


def train(run_dir: Path, tree: dict[str, Any]) -> Adapted:
    """Run a job with workers of its own, as the flow does; return what it leaves."""
    config = build_config({**tree, "run_dir": os.fspath(run_dir)})
    result = Adapted()
    with Session.open(config, run_id=run_dir.name) as session:
        drive(session)
        for name in ("actor.training", "critic.training"):
            result.state[name] = read_whole_state(session, session._engine, name)
        session.finish()
    result.metrics, result.decisions, result.transitions = (
        read_records(os.fspath(run_dir / f"{name}.jsonl")) for name in ("metrics", "decisions", "transitions")
    )
    result.tokens = [metrics["rollouts_digest"] for metrics in result.metrics]
    assert [metrics["step"] for metrics in result.metrics] == list(range(config.steps))
    return result


def adapted_and_fixed(name: str, folder: Path, cluster: dict[str, Any], **changes: Any) -> tuple[Adapted, Adapted]:
    """Run a recipe in float64 under control, and with the same samples on one plan.

    Args:
        cluster: what of the recipe's changes for both; memory is without limit on the one plan.
        changes: of the recipe.
    """
    tree = {**yaml.safe_load((RECIPES / f"{name}.yaml").read_text()), "precision": "float64", **changes}
    fixed = {**tree, "adapt": {"enabled": False}, "plan": uniform_plan(STAGES, 2, 1, 1), "drift": {}}
    fixed["cluster"] = {**tree["cluster"], "devices": 2, "memory_per_device": "2GiB"}
    tree["cluster"] = {**tree["cluster"], **cluster}
    return train(folder / "adapted", tree), train(folder / "fixed", fixed)


@pytest.fixture(autouse=True)
def _open_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "make_engine", make_engine)


def changes_of(run: Adapted) -> list[tuple[int, str]]:
    """Return the steps before which state has moved, each with the verdict that led to it."""
    verdicts = {decision["step"]: decision["verdict"] for decision in run.decisions}
    return [(line["step"], verdicts[line["step"]]) for line in run.transitions if line["outcome"] == "committed"]


def degrees_of(run: Adapted) -> dict[tuple[str, str], set[int]]:
    """Return all degrees that each model-stage was moved from or to."""
    degrees = defaultdict(set)
    for line in run.transitions:
        if line["outcome"] == "committed":
            for name, degree in itertools.product(STAGES, ("dp", "tp", "pp")):
                degrees[name, degree] |= {line[end][name][degree] for end in ("from", "to")}
    return degrees


@pytest.mark.timeout(900)
def test_adapt_cpu(tmp_path: Path) -> None:
    run, fixed = adapted_and_fixed("adapt-cpu", tmp_path, ADAPT_CPU, steps=16)
    assert_same(run, fixed)
    changes = changes_of(run)
    assert (7, "urgent") in changes, changes
    assert any(verdict == "admit" for _, verdict in changes), changes


@pytest.mark.timeout(900)
def test_adapt_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are chosen by nominal rates, and taken: what changes doesn't hang on what else this machine does."""
    monkeypatch.setattr(Session, "_measure_machine", lambda *_: None)
    monkeypatch.setattr(Calibration, "observe", lambda *_: None)
    monkeypatch.setattr(Calibration, "observe_rest", lambda *_: None)
    adapt = {"enabled": True, "policy": "any_gain"}
    changes = {"steps": FEW_STEPS, "drift": {"devices": FAST_DRIFT}, "adapt": adapt}
    run, fixed = adapted_and_fixed("adapt-4", tmp_path, ADAPT_4, **changes)
    assert_same(run, fixed)
    assert [metrics["devices_present"] for metrics in run.metrics[::2]] == [
        [0, 1, 2, 3],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
    ]
    constant = [where for where, degrees in degrees_of(run).items() if len(degrees) == 1]
    assert not constant, f"{constant} stayed what it was; changes: {changes_of(run)}"
