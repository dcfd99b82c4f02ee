"""The flow and its tasks on a real Prefect API, over a session without workers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

import flows.ppo
import tasks.adapt
import tasks.ppo
from nereus.config import RunConfig, load_config
from nereus.progress import Event, watch
from nereus.runtime.engine import CommandError
from nereus.runtime.session import NoDevices
from tests.flows.fake_session import FakeSession, find_session

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture(autouse=True)
def _fake_session(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flows.ppo, "Session", FakeSession)
    monkeypatch.setattr(tasks.ppo, "find_session", find_session)
    monkeypatch.setattr(tasks.adapt, "find_session", find_session)
    monkeypatch.setattr(FakeSession, "opened", {})


def config_in(folder: Path, *overrides: str) -> RunConfig:
    return load_config("tiny-cpu", [f"run_dir={folder / 'amber'}", *overrides])


def test_a_run_is_the_algorithm_step_by_step(tmp_path: Path):
    events: list[Event] = []
    with watch(events.append):
        summary = flows.ppo.train_ppo(config_in(tmp_path, "steps=3"))
    session = FakeSession.opened["amber"]
    assert summary["final"].endswith("amber/final")
    assert session.closed
    for step in range(3):
        names = [name for name, at in session.calls if at == step]
        assert names[0] == "generate"
        assert set(names[1:5]) == {"score", "infer_reference", "infer_logprobs", "infer_values"}
        assert names[5] == "estimate_advantages"
        assert set(names[6:8]) == {"train_actor", "train_critic"}
        assert names[8:] == ["sync_weights", "finish_step", "stage_state"]
    assert [at for _, at in session.calls] == sorted(at for _, at in session.calls)
    assert [event.step for event in events if event.kind == "step"] == [0, 1, 2]
    assert events[0].kind == "opened"


def test_a_decision_is_told_and_shown_before_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeSession, "decisions", {1: {"step": 1, "verdict": "keep", "reason": "It is the best."}})
    shown: list[list[dict]] = []
    monkeypatch.setattr(tasks.adapt, "publish_decisions", lambda decisions, transitions: shown.append(decisions))
    events: list[Event] = []
    with watch(events.append):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=2"))
    kinds = [(event.kind, event.step) for event in events if event.kind in ("decision", "step")]
    assert kinds == [("step", 0), ("decision", 1), ("step", 1)]
    assert shown == [[{"step": 1, "verdict": "keep", "reason": "It is the best."}]]


def test_a_step_that_loses_a_device_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeSession, "fail_at", ("infer_values", 1))
    monkeypatch.setattr(FakeSession, "losses", 3)
    with pytest.raises(CommandError, match="device 1 died in infer_values of step 1"):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=3"))
    session = FakeSession.opened["amber"]
    assert [name for name, at in session.calls if name in ("generate", "make_ready") and at == 1] == [
        "generate", "make_ready", "generate", "make_ready", "generate", "make_ready"
    ]  # fmt: skip
    assert session.closed


def test_an_end_that_loses_a_device_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeSession, "fail_at", ("finish", 2))
    monkeypatch.setattr(FakeSession, "losses", 3)
    with pytest.raises(CommandError, match="device 1 died in finish of step 2"):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=2"))
    at_the_end = [name for name, at in FakeSession.opened["amber"].calls if at == 2]
    assert at_the_end == ["finish", "make_ready"] * 3


def test_without_devices_the_run_commits_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FakeSession, "ends_at", 2)
    with pytest.raises(NoDevices, match="no devices from step 2 on"):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=3"))
    session = FakeSession.opened["amber"]
    assert session.calls[-1] == ("settle", 2) and session.closed


@pytest.mark.parametrize("at_opening", [True, False])
def test_a_deployed_run_without_devices_is_suspended(at_opening: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In the middle as at its beginning, when it is resumed and there is still nothing to run on."""

    def find_none(*_: object, **__: object) -> None:
        raise NoDevices("No plan fits the devices that are there.")

    keys: list[str] = []
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__ID", "d")
    monkeypatch.setattr(flows.ppo, "suspend_flow_run", lambda key: keys.append(key))
    monkeypatch.setattr(FakeSession, *(("open", find_none) if at_opening else ("ends_at", 1)))
    with pytest.raises(NoDevices):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=2"))
    assert [key.rsplit("-", 1)[0] for key in keys] == ["amber"]


def test_stages_without_shared_results_run_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    inside, most = set(), set()

    def note(self: FakeSession, name: str, step: int) -> dict:
        inside.add(name)
        time.sleep(0.3)
        most.add(frozenset(inside))
        inside.discard(name)
        return {}

    monkeypatch.setattr(FakeSession, "_note", note)
    flows.ppo.train_ppo(config_in(tmp_path, "steps=1"))
    assert {"score", "infer_reference", "infer_logprobs", "infer_values"} in most
    assert {"train_actor", "train_critic"} in most


@pytest.mark.parametrize("stage", ["generate", "infer_values", "train_critic", "finish_step"])
def test_a_failure_in_any_stage_ends_the_run_and_frees_the_session(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(FakeSession, "fail_at", (stage, 1))
    with pytest.raises(RuntimeError, match=f"device 1 died in {stage} of step 1"):
        flows.ppo.train_ppo(config_in(tmp_path, "steps=3"))
    session = FakeSession.opened["amber"]
    assert session.closed
    assert max(step for _, step in session.calls) == 1


def test_parameters_as_the_ui_sends_them():
    summary = flows.ppo.train_ppo(config={"steps": 1, "run_dir": "runs/from-ui"})
    assert summary["run_dir"] == "runs/from-ui"


def test_the_form_knows_schedules_and_their_transport():
    schema = parameter_schema(flows.ppo.train_ppo).model_dump_for_openapi()
    plan = {"actor.generation": {"dp": 2}}
    for config in ({"plan": "auto"}, {"plan": plan}, {"plan": [[0, "auto"], [4, plan]], "transport": "staged"}):
        validate({"config": config}, schema, raise_on_error=True)
    for wrong in ({"plan": [[0, "auto", 3]]}, {"plan": [["now", "auto"]]}, {"transport": "fast"}):
        with pytest.raises(ValidationError):
            validate({"config": wrong}, schema, raise_on_error=True)


def test_the_form_knows_drift_and_what_is_done_about_it():
    schema = parameter_schema(flows.ppo.train_ppo).model_dump_for_openapi()
    traces = ([[0, 2], [6, 1]], "trace.csv", {"file": "trace.csv", "scale": 2}, None)
    for config in ({"drift": {"devices": trace}, "adapt": {"policy": "every_k", "every": 2}} for trace in traces):
        validate({"config": config}, schema, raise_on_error=True)
    for wrong in ({"drift": {"devices": [["now", 2]]}}, {"drift": {"devices": 3}}, {"adapt": {"policy": "best"}}):
        with pytest.raises(ValidationError):
            validate({"config": wrong}, schema, raise_on_error=True)


def test_without_a_run_dir_the_run_has_the_id_of_the_flow_run():
    flows.ppo.train_ppo(load_config("tiny-cpu", ["steps=1"]))
    (run_id,) = FakeSession.opened
    assert len(run_id) == 36


def test_a_resumed_run_is_opened_by_its_directory_and_for_this_flow_run(tmp_path: Path):
    config = load_config("tiny-cpu", ["steps=1"])
    flows.ppo.train_ppo(config, resume_from=str(tmp_path / "old"))
    session = FakeSession.opened["old"]
    assert session.resume_from == str(tmp_path / "old")
    assert session.flow_run_id is not None and len(session.flow_run_id) == 36


def default_interrupts() -> None:
    """Let Ctrl-C reach a child of tests that run in the background, where shells have it ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("sent", "arguments", "where"),
    [
        (signal.SIGTERM, [], "in training"),
        pytest.param(signal.SIGINT, [], "in training", marks=pytest.mark.long),
        (signal.SIGTERM, ["20"], "in a primitive"),
        pytest.param(signal.SIGTERM, ["60"], "in a primitive", marks=pytest.mark.long),
    ],
)
def test_a_signal_in_the_middle_of_anything_frees_the_session(
    sent: signal.Signals, arguments: list[str], where: str, tmp_path: Path
):
    (tmp_path / "amber").mkdir()
    log = (tmp_path / "stderr").open("w")
    flow_process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("slow_run.py")), str(tmp_path / "amber"), *arguments],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": PREFECT_API_URL.value()},
        preexec_fn=default_interrupts,
    )
    try:
        assert flow_process.stdout is not None
        assert flow_process.stdout.readline() == f"{where}\n"
        flow_process.send_signal(sent)
        try:
            output, _ = flow_process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            flow_process.send_signal(signal.SIGUSR1)  # it says where its threads are
            time.sleep(2)
            pytest.fail(f"it did not end:\n{(tmp_path / 'stderr').read_text()[-20000:]}")
        assert "stopped" in output
        assert (tmp_path / "amber" / "closed").exists()
    finally:
        flow_process.kill()
        flow_process.wait()
        log.close()
