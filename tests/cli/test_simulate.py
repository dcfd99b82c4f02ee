"""`nereus simulate`: the table, the JSON document, the picture, and wrong input."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from nereus.cli import app

SCENARIO = {
    "model": {"preset": "smollm2-135m"},
    "cluster": {"preset": "a100-64gb-hdr", "devices": 4},
    "workload": {"prompts_per_step": 64, "prompt_tokens": 128, "response_tokens": 500, "max_response_tokens": 400},
    "devices": [[0, 2], [1, 4]],
    "steps": 3,
}


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SCENARIO))
    return str(path)


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_the_document_has_the_promised_keys(scenario: str):
    result = run(scenario, "gamma=0.4", "--json", "--policy", "payback", "--policy", "oracle")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert list(document["policies"]) == ["payback", "oracle"]
    promised = {
        "steps", "mean_step_s", "total_s", "transitions", "layout_transitions", "transition_s",
        "layout_transition_s", "transition_share", "oom_steps", "mean_gap_to_best_plan", "regret_to_oracle", "plans",
    }  # fmt: skip
    for entry in document["policies"].values():
        assert promised <= set(entry)
        assert entry["steps"] == 3
        assert entry["mean_step_s"] == pytest.approx(entry["total_s"] / 3)
        assert entry["plans"][0]["step"] == 0
        assert "actor.generation" in entry["plans"][0]["plan"]
    assert document["policies"]["oracle"]["regret_to_oracle"] == 0
    assert document["devices"] == [2, 4, 4]


def test_the_table_names_policies_and_warns_of_the_cap(scenario: str, tmp_path: Path):
    picture = tmp_path / "policies.png"
    result = run(scenario, "--policy", "fixed", "--policy", "payback", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert "fixed" in result.stdout and "payback" in result.stdout
    assert "training problem" in " ".join(result.stdout.split())
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gamma=2"], "`gamma` is 2"),
        (["devices={file: gone.csv}"], "devices.file is 'gone.csv'"),
        (["model.preset=llama-3.3-70b", "cluster.devices=2", "devices=null"], "No plan fits 2 devices of 64 GiB"),
        (["cluster.preset=abacus"], "abacus"),
        (["model.preset=gpt-9"], "model: preset is 'gpt-9'"),
        (["gamma=-0.5"], "`gamma` is -0.5"),
        (["devices=[[0, 0]]"], "0 devices for ever"),
        (["workload.response_tokens=20000", "workload.max_response_tokens=null"], "positions of actor.generation"),
        (["--policy", "lucky"], "--policy is 'lucky'"),
        (["--plot", "picture.doc"], "--plot is 'picture.doc'"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    scenario: str, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NEREUS_TRACES", raising=False)
    result = run(scenario, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.strip().splitlines()[-1].startswith("nereus: ")
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("-5,3", "has the negative time -5"),
        ("0,3\n300,3\n200,3", "goes from 300 s back to 200 s"),
        ("0,0\n300,0", "has 0 devices for ever"),
        ("0,inf", "isn't finite"),
    ],
)
def test_wrong_traces_are_one_sentence_and_exit_code_2(scenario: str, tmp_path: Path, lines: str, message: str):
    trace = tmp_path / "trace.csv"
    trace.write_text(f"seconds,available\n{lines}\n")
    result = run(scenario, f"devices={{file: {trace}}}")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_an_unknown_scenario_is_answered_with_a_near_one():
    result = run("flaping")
    assert (result.exit_code, "did you mean the scenario `flapping`?" in result.stderr) == (2, True)
