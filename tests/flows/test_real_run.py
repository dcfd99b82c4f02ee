"""A small run through the command line, the real flow and real workers: its checkpoint, its report, and more steps."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from nereus.cli import app
from nereus.transition.memory import format_bytes
from storage.journal import Journal

SMALL = (
    "model.tiny={hidden: 32, layers: 2, heads: 4, kv_heads: 2, intermediate: 32, vocab: 16}",
    "rollout={prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 8}",
    "cluster.memory_per_device=1GiB",
    "steps=2",
)


@pytest.mark.usefixtures("prefect_api")
def test_from_a_recipe_to_a_checkpoint_that_transformers_loads_and_on(tmp_path: Path):
    run_dir, out = tmp_path / "amber", tmp_path / "out"
    result = CliRunner().invoke(app, ["run", "tiny-cpu", *SMALL, "--run-dir", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert f"{run_dir}/report.html" in result.stdout
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1]
    assert "actor.training" in (run_dir / "report.html").read_text()
    assert CliRunner().invoke(app, ["export", str(run_dir), str(out)]).exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(out).config.hidden_size == 32
    assert AutoTokenizer.from_pretrained(out).decode([4, 5]) == "ae"

    again = CliRunner().invoke(app, ["run", "tiny-cpu", *SMALL, "--run-dir", str(run_dir)])
    assert again.exit_code == 2
    assert again.stderr.startswith(f"nereus: run_dir: {run_dir} already holds a run; choose another directory, or")

    more = CliRunner().invoke(app, ["resume", str(run_dir), "steps=3", "cluster.devices=1"])
    assert more.exit_code == 0, more.output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    used = [sorted({device for stage in line["plan"].values() for device in stage["devices"]}) for line in lines]
    assert used == [[0, 1], [0, 1], [0]]
    assert CliRunner().invoke(app, ["inspect", str(run_dir), "--verify"]).exit_code == 0


# The plan changes with step 2.
TWO_PLANS = (
    "plan=["
    "[0, {actor.generation: {dp: 2}, actor.training: {tp: 2}, critic.training: {pp: 2}, reference.inference: {}}], "
    "[2, {actor.generation: {tp: 2}, actor.training: {dp: 2}, critic.training: {}, reference.inference: {dp: 2}}]]"
)


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_a_run_that_goes_on_begins_with_the_plan_of_its_step(tmp_path: Path):
    run_dir = tmp_path / "amber"
    begun = CliRunner().invoke(app, ["run", "tiny-cpu", *SMALL, TWO_PLANS, "--run-dir", str(run_dir)])
    assert begun.exit_code == 0, begun.output
    more = CliRunner().invoke(app, ["resume", str(run_dir), "steps=3", "transport=staged"])
    assert more.exit_code == 0, more.output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["plan"]["actor.training"]["tp"] for line in lines] == [2, 2, 1]
    assert not (run_dir / "transitions.jsonl").exists()  # it was built so, nothing moved


@pytest.mark.long
@pytest.mark.usefixtures("prefect_api")
def test_the_plan_changes_in_the_midst_of_a_run(tmp_path: Path):
    run_dir = tmp_path / "copper"
    result = CliRunner().invoke(app, ["run", "tiny-cpu", *SMALL, "steps=4", TWO_PLANS, "--run-dir", str(run_dir)])
    assert result.exit_code == 0, result.output
    assert "plan  actor.generation 2x1x1 on 0,1 -> 1x2x1 on 0,1; actor.training 1x2x1" in result.stdout
    (changed,) = [json.loads(line) for line in (run_dir / "transitions.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (changed["step"], changed["outcome"], changed["verified"]) == (2, "committed", True)
    assert changed["from"] == lines[1]["plan"] and changed["to"] == lines[2]["plan"]
    assert changed["seconds"] > 0 and changed["bytes"] == sum(part["bytes"] for part in changed["primitives"]) > 0
    fields = {"id", "kind", "model_stage", "depends_on", "transport", "bytes", "seconds"}
    assert all(set(part) == fields for part in changed["primitives"])
    ids = [part["id"] for part in changed["primitives"]]
    assert all(set(part["depends_on"]) <= set(ids) for part in changed["primitives"]) and len(set(ids)) == len(ids)
    assert {part["model_stage"] for part in changed["primitives"]} == set(lines[0]["plan"])
    assert [line["plan"]["actor.training"]["tp"] for line in lines] == [2, 2, 1, 1]
    assert [line["seconds"]["transition"] > 0 for line in lines] == [False, False, True, False]
    assert all(line["first_ratio_max_error"] < 1e-3 for line in lines)
    assert all(line["generation_logprob_gap_max"] < 1e-3 for line in lines)
    assert "Plan changes" in (run_dir / "report.html").read_text()
    check_tasks_and_artifacts(run_dir, changed)


def check_tasks_and_artifacts(run_dir: Path, changed: dict[str, Any]) -> None:
    """Check that the API shows each primitive as a task with its bytes and seconds, and the graph before and after."""
    flow_run_id = next(entry.body["flow_run_id"] for entry in Journal(str(run_dir)).entries())
    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    expected = Counter(
        f"{part['model_stage']} {part['kind']}"
        + (f", {format_bytes(part['bytes'])} {part['transport']}" if part["bytes"] else "")
        + f", {part['seconds']:.2f} s"
        for part in changed["primitives"]
    )
    deadline = time.monotonic() + 30.0
    with get_client(sync_client=True) as client:
        while True:  # states reach the API a moment later
            tasks = client.read_task_runs(flow_run_filter=wanted, limit=200)
            primitives = [task for task in tasks if task.name.endswith(" s")]
            if len(primitives) == len(changed["primitives"]) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
        artifacts = [shown for shown in client.read_artifacts(flow_run_filter=wanted) if shown.key == "transition"]
    assert Counter(task.name for task in primitives) == expected
    assert [task.name for task in tasks if task.name.startswith("transition-")] == ["transition-2"]
    waits = sum(len(task.task_inputs.get("wait_for", [])) for task in primitives)
    before = [part for part in changed["primitives"] if part["kind"] != "destroy"]
    assert waits >= sum(len(part["depends_on"]) for part in before)
    planned, measured = (str(shown.data) for shown in sorted(artifacts, key=lambda shown: shown.created))
    assert "```mermaid\nflowchart LR\n" in planned and "```mermaid\nflowchart LR\n" in measured
    assert "planned" in planned and f"{changed['seconds']:.2f} s, committed" in measured
