"""`nereus scale` and `drain`: what a job is told, and one sentence with exit code 2 for what makes no sense."""

import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nereus.cli import app
from nereus.config import dump_config, load_config
from nereus.control import read_controls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    folder = tmp_path / "amber"
    folder.mkdir()
    (folder / "run.yaml").write_text(dump_config(load_config("tiny-cpu", ["cluster.devices=4"])))
    return str(folder)


def test_scale_tells_how_many_devices_there_are(run_dir: str):
    result = run("scale", run_dir, "3")
    assert result.exit_code == 0
    assert result.stdout == "the job is told that devices 0 to 2 are there; it hears so before its next step\n"
    assert run("scale", run_dir, "1").stdout.startswith("the job is told that device 0 is there")
    assert run("scale", run_dir, "0").stdout.startswith("the job is told that no device is left; it ends after")
    assert read_controls(run_dir).scale == 0


def test_drain_tells_which_device_goes_and_when(run_dir: str):
    result = run("drain", run_dir, "3")
    assert result.stdout == "the job is told to leave device 3; it hears so before its next step\n"
    before = time.time()
    result = run("drain", run_dir, "2", "--deadline", "90.5")
    assert result.stdout.startswith("the job is told to leave device 2, which goes at ")
    drains = read_controls(run_dir).drains
    assert drains[3] is None
    assert before + 90.5 <= drains[2] <= time.time() + 90.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scale", "HERE", "5"], "N is 5, but cluster.devices of this run is 4; give a number from 0 to 4."),
        (["scale", "HERE", "-1"], "N is -1, but cluster.devices of this run is 4; give a number from 0 to 4."),
        (["scale", "HERE", "1.5"], "N is '1.5', which is no whole number."),
        (["scale", "HERE", "all"], "N is 'all', which is no whole number."),
        (["scale", "GONE", "1"], "RUN_DIR GONE holds no run (there is no run.yaml in it); give the directory of"),
        (["scale", "HERE/run.yaml", "1"], "RUN_DIR HERE/run.yaml holds no run (there is no run.yaml in it); give"),
        (["scale", "nosuch://x", "1"], "RUN_DIR nosuch://x can't be read (Protocol not known: nosuch); choose"),
        (["drain", "HERE", "4"], "DEVICE is 4, which is no device of this run; they are 0 to 3."),
        (["drain", "HERE", "-1"], "DEVICE is -1, which is no device of this run; they are 0 to 3."),
        (["drain", "HERE", "gpu0"], "DEVICE is 'gpu0', which is no whole number."),
        (["drain", "GONE", "1"], "RUN_DIR GONE holds no run"),
        (
            ["drain", "HERE", "1", "--deadline", "-3"],
            "--deadline is '-3'; give a number of seconds from now, 0 or more.",
        ),
        (["drain", "HERE", "1", "--deadline", "nan"], "--deadline is 'nan'; give a number of seconds from now"),
        (["drain", "HERE", "1", "--deadline", "1e300"], "--deadline is '1e300'; give a number of seconds from now"),
        (["drain", "HERE", "1", "--deadline", "soon"], "--deadline is 'soon'; give a number of seconds from now"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(run_dir: str, arguments: list[str], message: str):
    places = {"HERE": run_dir, "GONE": f"{run_dir}-not"}
    for name, place in places.items():
        arguments = [argument.replace(name, place) for argument in arguments]
        message = message.replace(name, place)
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"nereus: {message}") and len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output
    assert read_controls(run_dir).number == 0


def test_a_device_is_drained_once(run_dir: str):
    assert run("drain", run_dir, "1", "--deadline", "60").exit_code == 0
    for arguments in (["drain", run_dir, "1"], ["drain", run_dir, "1", "--deadline", "99"]):
        result = run(*arguments)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("nereus: DEVICE 1 is drained already, which goes at ")
    assert run("drain", run_dir, "1", "--deadline", "1").exit_code == 0
    assert run("scale", run_dir, "2").exit_code == 0
    assert run("drain", run_dir, "1").exit_code == 0


def test_a_control_folder_that_cannot_be_written(run_dir: str):
    Path(run_dir, "control").write_text("in the way")
    for arguments in (["scale", run_dir, "1"], ["drain", run_dir, "1"]):
        result = run(*arguments)
        assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith(f"nereus: {run_dir}/control can't be written (")


@pytest.mark.parametrize("text", ["steps: [", "stepz: 3", "- 1"])
def test_a_run_of_another_version(run_dir: str, text: str):
    Path(run_dir, "run.yaml").write_text(text)
    result = run("scale", run_dir, "1")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"nereus: run.yaml in RUN_DIR {run_dir} is none of this version (")


def test_a_store_that_is_not_there_is_one_sentence_without_secrets(monkeypatch: pytest.MonkeyPatch):
    secret = "hush-hush"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "who")
    result = run("scale", "s3://bucket/run", "1")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("nereus: RUN_DIR s3://bucket/run can't be read (")
    assert secret not in result.output


def test_both_commands_reach_an_object_store(s3_url: str):
    from storage.small_files import replace_file

    assert "holds no run" in run("scale", s3_url, "1").stderr
    replace_file(f"{s3_url}/run.yaml", dump_config(load_config("tiny-cpu")).encode())
    assert run("scale", s3_url, "1").exit_code == 0
    assert run("drain", f"{s3_url}/", "0").exit_code == 0
    told = read_controls(s3_url)
    assert (told.scale, told.drains) == (1, {0: None})
