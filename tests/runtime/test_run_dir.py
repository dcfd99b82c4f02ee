"""The run directory: taken by one run only, cut back by one that goes on, given back by one that could not start."""

from pathlib import Path

import pytest

from nereus.config import RunConfig
from nereus.runtime.run_dir import RunDir
from storage.journal import Journal


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "amber") if request.param == "local" else f"memory://{tmp_path.name}/amber"


@pytest.mark.parametrize("what", ["journal", "run.yaml"])
def test_a_directory_holds_one_run(url: str, what: str) -> None:
    run_dir = RunDir(url)
    run_dir.check_free()
    if what == "journal":
        Journal(url).append("take_over", {})
    else:
        run_dir.write_config(RunConfig())
    with pytest.raises(ValueError) as caught:
        run_dir.check_free()
    assert str(caught.value) == (
        f"run_dir: {url} already holds a run; choose another directory, or go on with `nereus resume {url}`."
    )


def test_a_forgotten_run_leaves_nothing(url: str) -> None:
    run_dir = RunDir(url)
    run_dir.note_before()
    Journal(url).append("take_over", {})
    run_dir.write_config(RunConfig())
    run_dir.append_metrics({"step": 0})
    run_dir.forget()
    assert not run_dir._exists()
    run_dir.check_free()


def test_what_was_there_before_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    run_dir = RunDir(str(tmp_path))
    run_dir.note_before()
    Journal(str(tmp_path)).append("take_over", {})
    run_dir.write_config(RunConfig())
    run_dir.forget()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_what_a_kill_has_left_of_the_config_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def be_killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", be_killed)
        patch.setattr("os.unlink", lambda path: None)
        with pytest.raises(SystemExit):
            RunDir(str(tmp_path)).write_config(RunConfig())
    assert len(list(tmp_path.iterdir())) == 1
    RunDir(str(tmp_path)).write_config(RunConfig())
    assert [file.name for file in tmp_path.iterdir()] == ["run.yaml"]


def test_records_are_cut_back_to_the_step_that_is_done_again(url: str) -> None:
    run_dir = RunDir(url)
    for step in range(4):
        run_dir.append_metrics({"step": step})
    run_dir.cut_back(2)
    run_dir.append_metrics({"step": 2})
    assert [record["step"] for record in run_dir.read("metrics.jsonl")] == [0, 1, 2]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^run_dir: .*file can't be read \(.*\); choose another directory"):
        RunDir(str(tmp_path / "file")).check_free()
