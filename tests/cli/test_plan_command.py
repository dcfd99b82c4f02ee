"""`nereus plan` on the command line: tables and JSON for runs and for clusters, and wrong input in one sentence."""

import json

import pytest
from typer.testing import CliRunner

from nereus.cli import app
from nereus.plan import Plan

RUNNER = CliRunner()
CLUSTER = ["plan", "--model", "smollm2-135m", "--cluster", "h100-dgx", "--devices", "4", "--samples", "16"]


def run(*arguments: str):
    return RUNNER.invoke(app, list(arguments), env={"COLUMNS": "120"})


def test_json_holds_the_best_plan_its_memory_and_why_others_are_worse():
    done = run(*CLUSTER, "--response-tokens", "300", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert set(record) == {"best", "runners_up", "infeasible"}
    best = record["best"]
    plan = Plan.from_record(best["plan"])
    assert set(plan) == {
        *("actor.generation", "actor.training", "critic.training"),
        *("reference.inference", "reward.inference"),
    }
    assert best["step_s"] == pytest.approx(sum(best["stages_s"].values()))
    assert set(best["memory_bytes"]) == {str(device) for device in plan.devices}
    assert all(kinds["parameters"] > 0 for kinds in best["memory_bytes"].values())
    assert record["runners_up"]
    for each in record["runners_up"]:
        assert each["step_s"] >= best["step_s"] and each["why"].startswith("+")
        assert Plan.from_record(each["plan"]) != plan


def test_the_table_says_what_dominates_and_how_full_devices_get():
    done = run(*CLUSTER, "--response-tokens", "300", "--no-reward-model")
    assert done.exit_code == 0, done.output
    for part in (
        "Best plan:",
        "Where the time goes",
        "Memory at the peak",
        "Next best",
        "generation",
        "may be used",
        "72.0",
    ):
        assert part in done.stdout, part
    assert "reward.inference" not in done.stdout


def test_a_recipe_is_planned_on_as_many_devices_as_asked_for():
    record = json.loads(run("plan", "tiny-cpu", "ppo.minibatches=4", "--devices", "3", "--json").stdout)
    assert set(record["best"]["plan"]) == {
        *("actor.generation", "actor.training", "critic.training", "reference.inference"),
    }
    assert set(record["best"]["memory_bytes"]) <= {"0", "1", "2"}


def test_the_best_plan_is_another_question_than_the_schedule_of_a_config():
    schedule = "plan=[[0, {actor.training: {dp: 2}}], [2, auto]]"
    with_it, without = (run("plan", "tiny-cpu", *more, "--json") for more in ([schedule], []))
    assert with_it.exit_code == 0, with_it.output
    assert json.loads(with_it.stdout) == json.loads(without.stdout)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan"], "--model is missing"),
        (["plan", "--model", "smollm2-135m"], "--cluster is missing"),
        (["plan", "tiny-cpu", "--model", "smollm2-135m"], "beside a run config"),
        (["plan", "tiny-cpu", "--response-tokens", "9"], "--response-tokens is 9 beside a run config"),
        (["plan", "tiny-cpu", "rollout.max_response_tokens=9000"], "more than the 8192 positions"),
        (["plan", *CLUSTER[1:], "--response-tokens", "8000"], "more than the 8192 positions"),
        (["plan", *CLUSTER[1:], "--response-tokens", "0"], "--response-tokens"),
        (["plan", "--model", "smollm2-135m", "--cluster", "h100-dgx", "--devices", "0"], "--devices"),
        (["plan", "--model", "gpt-9", "--cluster", "h100-dgx"], "choose one of llama-3.1-8b"),
        (["plan", "--model", "smollm2-135m", "--cluster", "abacus"], "choose one of a100-64gb-hdr"),
        (["plan", "--model", "/nowhere/config.json", "--cluster", "h100-dgx"], "/nowhere/config.json"),
        (["plan", "--model", "llama-3.3-70b", "--cluster", "h100-dgx", "--devices", "2"], "No plan fits 2 devices"),
        (["plan", *CLUSTER[1:], "--minibatches", "17"], "17 minibatches of 16 samples"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str):
    done = run(*arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
