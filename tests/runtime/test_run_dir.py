"""The run directory: taken by one run only, and given back by a run that could not start."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from nereus.config import RunConfig
from nereus.runtime.run_dir import RunDir


@pytest.fixture(params=["local", "memory"])
def url(request, tmp_path):
    return str(tmp_path / "amber") if request.param == "local" else f"memory://{tmp_path.name}/amber"


def test_a_directory_holds_one_run(url):
    RunDir(url).check_free()
    RunDir.create(url, RunConfig())
    for attempt in (RunDir(url).check_free, lambda: RunDir.create(url, RunConfig())):
        with pytest.raises(ValueError, match="already holds a run; choose another directory"):
            attempt()


def test_of_many_runs_at_the_same_time_one_gets_it(tmp_path):
    def create(_):
        try:
            return RunDir.create(str(tmp_path / "amber"), RunConfig())
        except ValueError:
            return None

    with ThreadPoolExecutor(8) as threads:
        assert sum(made is not None for made in threads.map(create, range(16))) == 1


def test_a_forgotten_run_leaves_nothing(url):
    run_dir = RunDir.create(url, RunConfig())
    run_dir.append_metrics({"step": 0})
    run_dir.forget()
    assert not run_dir._exists()
    RunDir.create(url, RunConfig())


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    RunDir.create(str(tmp_path), RunConfig()).forget()
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^run_dir: .*file/amber can't be written \(.*\); choose another directory"):
        RunDir.create(str(tmp_path / "file" / "amber"), RunConfig())
