"""A small run through the command line, the real flow and real workers: its checkpoint, its report, and more steps."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from nereus.cli import app

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
    assert [line["plan"]["actor.training"]["devices"] for line in lines] == [[0, 1], [0, 1], [0]]
    assert CliRunner().invoke(app, ["inspect", str(run_dir), "--verify"]).exit_code == 0


# The plan changes with step 2.
TWO_PLANS = (
    "plan=["
    "[0, {actor.generation: {dp: 2}, actor.training: {tp: 2}, critic.training: {pp: 2}, reference.inference: {}}], "
    "[2, {actor.generation: {tp: 2}, actor.training: {dp: 2}, critic.training: {}, reference.inference: {dp: 2}}]]"
)


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
