"""`nereus inspect`, `reshard`, `export` and the door of `resume`: what is printed, and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nereus.cli import app
from tests.fake_run import FakeRun, flip, tiny_config

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def fake(tmp_path: Path) -> FakeRun:
    made = FakeRun(str(tmp_path / "run"), tiny_config(str(tmp_path / "run")))
    made.commit(0)
    made.commit(1)
    return made


def test_inspect_tells_what_is_committed(fake: FakeRun):
    result = run("inspect", fake.run_dir)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "run     amber, 5 steps; 1 driver, the last on here (pid 1)"
    assert lines[1].startswith("step 0   step-00000000-1: ")
    assert "actor.training: 90 tensors" in lines[2] and "plan 2x2x1" in lines[2]
    assert lines[-1] == "manifests are intact; --verify reads every byte"
    verified = run("inspect", fake.run_dir, "--verify")
    assert (verified.exit_code, verified.stdout.splitlines()[-1]) == (0, "every byte is as it was written")


def test_inspect_prints_one_json_document(fake: FakeRun):
    result = run("inspect", fake.run_dir, "--verify", "--json")
    record = json.loads(result.stdout)
    assert (record["kind"], record["run_id"], record["verified"], record["damage"]) == ("run", "amber", True, [])
    assert [report["step"] for report in record["sets"]] == [0, 1]


def test_damage_is_exit_code_1_with_one_sentence(fake: FakeRun):
    folder = f"{fake.root}/step-00000001-1"
    shard = next(name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors"))
    flip(f"{folder}/{shard}", -1)
    assert run("inspect", fake.run_dir).exit_code == 0
    for place in (fake.run_dir, folder):
        result = run("inspect", place, "--verify", "--json")
        assert result.exit_code == 1
        assert len(result.stderr.splitlines()) == 1 and shard in result.stderr
        assert len(json.loads(result.stdout)["damage"]) == 1


def test_a_damaged_journal_is_no_run_without_commits(fake: FakeRun):
    flip(f"{fake.run_dir}/journal/00000001.json", 40)
    result = run("inspect", fake.run_dir)
    assert result.exit_code == 1
    assert result.stdout == "without an intact journal nobody knows which sets are commits\n"
    assert "00000001.json is damaged" in result.stderr


def test_reshard_and_export(fake: FakeRun, tmp_path: Path):
    result = run("reshard", fake.run_dir, str(tmp_path / "state"), "--tp", "2", "--pp", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith(f"written to {tmp_path}/state")
    assert run("inspect", str(tmp_path / "state"), "--verify").exit_code == 0
    result = run("reshard", str(tmp_path / "state"), str(tmp_path / "hf"), "--tp", "1", "--pp", "1", "--to", "hf")
    assert result.exit_code == 0 and "holds no tokenizer" in result.stderr
    result = run("export", fake.run_dir, str(tmp_path / "out"), "--role", "critic", "--step", "0")
    assert result.stdout.strip() == f"4 files of the commit of step 0 written to {tmp_path}/out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "NOWHERE"], "holds neither a run nor committed state"),
        (["reshard", "RUN", "OUT", "--tp", "9", "--pp", "1"], "tp=9 is more than the model's 4 KV heads"),
        (["reshard", "NOWHERE", "OUT", "--tp", "1", "--pp", "1"], "holds neither staged state"),
        (["export", "RUN", "OUT", "--step", "9"], "has no commit of step 9"),
        (["resume", "NOWHERE"], "holds no run"),
        (["resume", "RUN", "seed=1"], "`seed` was 0 when this run was started and is 1 now"),
        (["resume", "RUN", "steps=3"], "`steps` is 5 for this run so far and 3 now"),
        (["resume", "RUN", "stepz=9"], "Unknown key `stepz`; did you mean `steps`?"),
        (["resume", "RUN", "staging.root=/elsewhere"], "`staging.root` was "),
        (["resume", "RUN", "plan.actor.generation.dp=9"], "plan.actor.generation: asks for device 4"),
        (["resume", "nosuch://x"], "can't be read"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(fake: FakeRun, arguments: list[str], message: str):
    places = {"RUN": fake.run_dir, "NOWHERE": f"{fake.run_dir}-not", "OUT": f"{fake.run_dir}-out"}
    result = run(*(places.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr and len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_a_store_that_is_not_there_is_one_sentence_without_secrets(monkeypatch: pytest.MonkeyPatch):
    secret = "hush-hush"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
    result = run("resume", "s3://bucket/run")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("nereus: RUN_DIR s3://bucket/run can't be read (")
    assert result.stderr.rstrip().endswith("check the endpoint (AWS_ENDPOINT_URL_S3) and the network.")
    assert secret not in result.output


@pytest.mark.parametrize("command", ["inspect", "report"])
def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:10")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    result = run(command, "s3://bucket/run")
    assert result.exit_code == 2
    assert "s3://bucket/run can't be read (NoCredentialsError: Unable to locate credentials); set AWS_" in result.stderr


@pytest.mark.usefixtures("prefect_api")
@pytest.mark.long
def test_a_killed_run_goes_on_from_the_command_line(tmp_path: Path):
    """SIGKILL of the driver in the middle of a run, then `resume` on fewer devices."""
    run_dir = tmp_path / "amber"
    code = """
import sys
from nereus.config import load_config
from nereus.runtime.session import Session
from tests.runtime.steps import run_step
with Session.open(load_config("tiny-cpu", sys.argv[1:]), run_id="amber") as session:
    for step in session.steps:
        run_step(session, step)
        session.stage_state(step)
"""
    overrides = [
        "model.tiny={hidden: 32, layers: 2, heads: 4, kv_heads: 2, intermediate: 32, vocab: 16}",
        "rollout={prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 8}",
        "cluster.memory_per_device=1GiB",
        "steps=16",
        f"run_dir={run_dir}",
    ]
    driver = subprocess.Popen([sys.executable, "-c", code, *overrides], cwd=ROOT)
    try:
        deadline = time.monotonic() + 100
        while count_steps(run_dir) < 3:
            assert driver.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert count_steps(run_dir) < 16
    result = run("resume", str(run_dir), "cluster.devices=1")
    assert result.exit_code == 0, result.output
    assert f"run   {run_dir}, goes on at step " in result.stdout
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(16))
    assert "2 drivers" in run("inspect", str(run_dir), "--verify").stdout


def count_steps(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0
