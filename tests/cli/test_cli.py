"""The command line: exit codes, one sentence for wrong input, what is printed."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from nereus.cli import app
from nereus.config import dump_config, load_config
from nereus.export import export_run
from nereus.progress import Event, publish, watch
from nereus.terminal import RunView

PLAN = {"actor.training": {"dp": 2, "tp": 1, "pp": 1, "devices": [0, 1], "micro_batch": 4, "recompute": False}}


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "tiny"], "nereus: There is no recipe and no file `tiny`; did you mean the recipe `tiny-cpu`?"),
        (["run", "tiny-cpu", "stepz=1"], "nereus: Unknown key `stepz`; did you mean `steps`?"),
        (["run", "tiny-cpu", "steps=0"], "nereus: `steps` is 0: it must be greater than 0."),
        (["run", "tiny-cpu", "model.path=no/such"], "nereus: model folder 'no/such' does not exist"),
        (["run", "tiny-cpu", "cluster.memory_per_device=16MiB"], "nereus: plan needs"),
        (["run", "tiny-cpu", "plan=[[2, auto]]"], "nereus: plan: the schedule begins at step 2; its first entry must"),
        (
            ["run", "tiny-cpu", "plan=[[0, auto], [2, {actor.training: {}}]]"],
            "nereus: plan from step 2 on leaves out `actor.generation`; name every model-stage of the run",
        ),
        (
            ["run", "tiny-cpu", "drift.devices=[[0, 2], [4, 3]]"],
            "nereus: drift.devices has 3 devices at step 4, but cluster.devices is 2; lower it, or raise",
        ),
        (["run", "tiny-cpu", "drift.devices=no.csv"], "nereus: drift.devices is 'no.csv', which is not here "),
        (["run", "tiny-cpu", "drift.devices=README.md"], "nereus: drift.devices: README.md has no column `seconds`"),
        (["report", "/nowhere"], "nereus: /nowhere holds no run"),
        (["export", "/nowhere", "out"], "nereus: /nowhere holds no finished run"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(arguments: list[str], message: str):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output


def test_report_prints_its_path(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(dump_config(load_config("tiny-cpu")))
    result = run("report", str(tmp_path))
    assert (result.exit_code, result.stdout.strip()) == (0, f"{tmp_path}/report.html")


def test_export_copies_the_checkpoint_and_never_over_files(tmp_path: Path):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (final / "model.safetensors").write_bytes(bytes(range(256)) * 9)
    out = tmp_path / "out"
    assert run("export", str(tmp_path / "run"), str(out)).exit_code == 0
    assert {file.name: file.read_bytes() for file in out.iterdir()} == {
        file.name: file.read_bytes() for file in final.iterdir()
    }
    again = run("export", str(tmp_path / "run"), str(out))
    assert again.exit_code == 2
    assert "is not empty; give a new directory" in again.stderr


def test_an_export_that_fails_leaves_nothing_behind(tmp_path: Path):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    (final / "model.safetensors").symlink_to(tmp_path / "gone")
    result = run("export", str(tmp_path / "run"), str(tmp_path / "out"))
    assert result.exit_code == 2
    assert result.stderr.strip().endswith("(there is no such file); nothing is exported.")
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_an_export_to_an_object_store_ends_with_its_config(tmp_path: Path):
    final = tmp_path / "final"
    final.mkdir()
    for name in ("a.json", "config.json", "model.safetensors"):
        (final / name).write_text("{}")
    done = export_run(str(tmp_path), f"memory://{tmp_path.name}/out")
    assert done.files == ("a.json", "model.safetensors", "config.json")


def test_progress_is_plain_lines_where_there_is_no_terminal():
    output = io.StringIO()
    metrics = {"step": 0, "reward_mean": 0.25, "kl_k1": 0.01, "response_tokens_mean": 12.0, "response_tokens_p95": 40,
               "rollout_tokens": 300, "seconds": {"total": 2.0}, "plan": PLAN}  # fmt: skip
    with RunView(Console(file=output, width=100)) as view, watch(view):
        assert view.run_dir is None
        publish(Event("opened", "amber", None, {"run_dir": "runs/amber", "steps": 2, "plan": PLAN}))
        publish(Event("stage", "amber", 0, {"stage": "generation"}))
        publish(Event("step", "amber", 0, metrics))
    lines = output.getvalue().splitlines()
    assert lines[:2] == ["run   runs/amber", "plan  actor.training 2x1x1 on 0,1"]
    assert lines[2].split() == ["step", "reward", "KL/token", "length", "p95", "tokens/s", "seconds"]
    assert lines[3].split() == ["0", "0.250", "0.0100", "12.0", "40", "150", "2.00"]
    assert len(lines) == 4
    assert "\x1b" not in output.getvalue()


def test_nobody_hears_after_the_watch_ended():
    heard: list[Event] = []
    with watch(heard.append):
        publish(Event("stage", "amber", 0, {"stage": "training"}))
    publish(Event("stage", "amber", 1, {"stage": "training"}))
    assert [event.step for event in heard] == [0]
