"""A run whose processes are killed goes on: by a retry in Prefect, and by `nereus resume`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nereus.config import RunConfig, load_config
from nereus.runtime.session import Session
from storage.journal import Entry, Journal
from storage.records import read_records
from tests.chaos.outcome import Outcome, assert_same, read_committed
from tests.flows.prefect_site import ROOT, PrefectSite, run_prefect_site
from tests.runtime.steps import run_step

LIMIT_S = 120.0
# Long enough to be killed in its midst, and quick.
SMALL = (
    "model.tiny={hidden: 32, layers: 2, heads: 4, kv_heads: 2, intermediate: 32, vocab: 16}",
    "rollout={prompts_per_step: 8, max_prompt_tokens: 16, max_response_tokens: 24}",
    "cluster.memory_per_device=1GiB",
    "adapt.enabled=false",  # what is compared bit by bit runs on one plan
    "steps=12",
)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectSite]:
    with run_prefect_site(tmp_path_factory.mktemp("prefect")) as site:
        yield site


def small_run(folder: Path) -> RunConfig:
    return load_config("tiny-cpu", [*SMALL, f"run_dir={folder}"])


@pytest.mark.timeout(400)
def test_a_killed_flow_run_is_retried_from_its_last_commit(site: PrefectSite, tmp_path: Path):
    config = small_run(tmp_path / "amber")
    deployment = site.request("/deployments/name/train-ppo/tiny-cpu")["id"]
    parameters = {"config": config.model_dump(mode="json")}
    flow_run = site.request(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
    entries = Journal(str(config.run_dir)).entries
    wait_for(lambda: len([entry for entry in entries() if entry.kind == "commit"]) >= 2, "a second commit")
    os.kill(entries()[0].body["pid"], signal.SIGKILL)
    # The worker reports the crash at once, and again when it has loaded the flow for its hooks; that report would end a
    # retry that has begun by then.
    advice = "Check whether the flow run exceeded its memory"
    wait_for(lambda: site.read_log("worker").count(advice) == 2, "the worker to be done with the crash")
    assert state_of(site, flow_run) == "CRASHED"
    killed_at = [step_of(entry) for entry in entries() if entry.kind == "commit"][-1]
    assert killed_at < config.steps - 1

    site.run("flow-run", "retry", flow_run)
    wait_for(lambda: state_of(site, flow_run) in ("COMPLETED", "FAILED", "CRASHED"), "the end of the retry")
    assert state_of(site, flow_run) == "COMPLETED"
    first, second = (entry for entry in entries() if entry.kind == "take_over")
    assert first.body["flow_run_id"] == second.body["flow_run_id"] == flow_run
    after = [step_of(entry) for entry in entries() if entry.number > second.number]
    assert after == list(range(killed_at + 1, config.steps)), "it went on from the last commit"
    assert_same(read_outcome(config), run_undisturbed(small_run(tmp_path / "undisturbed")), bitwise=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_command_is_resumed_on_another_number_of_devices(site: PrefectSite, tmp_path: Path):
    run_dir = tmp_path / "amber"
    command = [sys.executable, "-m", "nereus.cli"]
    process = subprocess.Popen(
        [*command, "run", "tiny-cpu", *SMALL, "--run-dir", str(run_dir)],
        cwd=ROOT,
        env=site.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        entries = Journal(str(run_dir)).entries
        wait_for(lambda: [entry for entry in entries() if entry.kind == "commit"], "a commit")
    finally:
        process.kill()
        _, said = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    resume = [*command, "resume", str(run_dir), "cluster.devices=1"]
    done = subprocess.run(resume, cwd=ROOT, env=site.env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metrics = read_records(run_dir / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(12))
    assert {len(line["peak_memory_bytes"]) for line in metrics} == {1, 2}
    assert (run_dir / "final" / "model.safetensors").exists()
    assert (run_dir / "report.html").exists()


@pytest.mark.timeout(400)
def test_a_run_without_devices_is_suspended_and_goes_on_when_it_is_resumed(site: PrefectSite, tmp_path: Path):
    """Its trace has no device from step 2 on. The same flow run goes on: the 0 counts as passed."""
    changes = ["steps=5", "adapt.enabled=true", "drift.devices=[[0, 2], [2, 0], [4, 1]]"]
    config = load_config("tiny-cpu", [*SMALL, *changes, f"run_dir={tmp_path / 'amber'}"])
    deployment = site.request("/deployments/name/train-ppo/tiny-cpu")["id"]
    parameters = {"config": config.model_dump(mode="json")}
    flow_run = site.request(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
    ended = ("PAUSED", "COMPLETED", "FAILED", "CRASHED")
    wait_for(lambda: state_of(site, flow_run) in ended, "the run to be suspended")
    assert site.request(f"/flow_runs/{flow_run}")["state"]["name"] == "Suspended"
    metrics = f"{config.run_dir}/metrics.jsonl"
    assert [line["step"] for line in read_records(metrics)] == [0, 1]

    site.request(f"/flow_runs/{flow_run}/resume", {})
    wait_for(lambda: state_of(site, flow_run) in ended[1:], "the end of the run")
    assert state_of(site, flow_run) == "COMPLETED"
    assert [line["step"] for line in read_records(metrics)] == list(range(5))
    drivers = [entry.body for entry in Journal(str(config.run_dir)).entries() if entry.kind == "take_over"]
    assert [driver["flow_run_id"] for driver in drivers] == [flow_run, flow_run]


def wait_for(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def state_of(site: PrefectSite, flow_run: str) -> str:
    return site.request(f"/flow_runs/{flow_run}")["state"]["type"]


def step_of(entry: Entry) -> int:
    return entry.body["step"]


def read_outcome(config: RunConfig) -> Outcome:
    return Outcome(read_records(f"{config.run_dir}/metrics.jsonl"), read_committed(str(config.run_dir)))


def run_undisturbed(config: RunConfig) -> Outcome:
    """Run a config without Prefect; what it comes to is the same."""
    with Session.open(config, run_id="undisturbed") as session:
        for step in session.steps:
            run_step(session, step)
            session.stage_state(step)
        session.finish()
    return read_outcome(config)
