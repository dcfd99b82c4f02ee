"""What people tell a job: numbered files in any store, heard in order, and read in bounded time."""

import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

import nereus.control
from nereus.control import ControlReader, read_controls, tell_drain, tell_scale
from nereus.supply import Controls
from storage.small_files import list_names


@pytest.fixture(params=["disk", "memory", "s3"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path):
    if request.param == "memory":
        yield f"memory://{tmp_path.name}"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
    else:
        yield str(tmp_path) if request.param == "disk" else request.getfixturevalue("s3_url")


def test_the_newest_file_says_all_that_holds(run_dir: str):
    assert read_controls(run_dir) == Controls()
    tell_scale(run_dir, 2)
    tell_drain(run_dir, 1, None)
    told = tell_drain(run_dir, 3, 1234.5)
    assert told == read_controls(run_dir) == Controls(3, 2, 1, {1: None, 3: 1234.5})
    assert list_names(f"{run_dir}/control") == ["00000001.json", "00000002.json", "00000003.json"]


def test_a_scale_takes_back_the_drains_that_it_covers(tmp_path: Path):
    for device in (0, 1, 2):
        tell_drain(str(tmp_path), device, None)
    assert tell_scale(str(tmp_path), 2) == Controls(4, 2, 4, {2: None})


def test_only_an_earlier_deadline_is_news_of_a_drained_device(tmp_path: Path):
    tell_drain(str(tmp_path), 1, None)
    tell_drain(str(tmp_path), 1, 100.0)
    for deadline in (None, 100.0, 101.0):
        with pytest.raises(ValueError, match=r"^DEVICE 1 is drained already, which goes at 00:01:40 UTC; only an earl"):
            tell_drain(str(tmp_path), 1, deadline)
    assert tell_drain(str(tmp_path), 1, 99.0).drains == {1: 99.0}


def test_who_speaks_at_once_is_heard_one_after_the_other(run_dir: str):
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda device: tell_drain(run_dir, device, None), range(6)))
    assert read_controls(run_dir) == Controls(6, None, 0, dict.fromkeys(range(6)))


def test_old_files_go(tmp_path: Path):
    for count in range(20):
        tell_scale(str(tmp_path), count)
    names = list_names(tmp_path / "control")
    assert (names[0], names[-1], len(names)) == ("00000005.json", "00000020.json", 16)


def test_what_is_known_is_not_read_again(tmp_path: Path):
    known = tell_scale(str(tmp_path), 1)
    (tmp_path / "control/00000001.json").write_text("{}")
    (tmp_path / "control/notes.txt").write_text("mine")
    assert read_controls(str(tmp_path), known) is known


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"scale": "x", "scale_number": 1, "drains": {}}',
        '{"scale": 1, "scale_number": 1, "drains": {"one": null}}',
        '{"scale": 1, "scale_number": 1, "drains": {"1": NaN}}',
        '{"scale": 1, "scale_number": 1, "drains": {"1": 1e300}}',
        '{"scale": 1, "scale_number": 1, "drains": []}',
    ],
)
def test_damage_is_named(tmp_path: Path, text: str):
    tell_scale(str(tmp_path), 1)
    tell_scale(str(tmp_path), 2)
    (tmp_path / "control/00000002.json").write_text(text)
    with pytest.raises(ValueError, match=r"^control/00000002.json is damaged \(.*\); remove it and give the command"):
        read_controls(str(tmp_path))


def test_what_is_in_the_way_of_the_folder_is_told(tmp_path: Path):
    (tmp_path / "control").write_text("in the way")
    with pytest.raises(ValueError, match=r"/control can't be written \(.*\); make it a directory that you may write"):
        tell_scale(str(tmp_path), 1)


def test_a_reader_hears_what_is_new_at_each_look(tmp_path: Path):
    reader = ControlReader(str(tmp_path))
    assert reader.read() == Controls()
    told = tell_scale(str(tmp_path), 1)
    assert reader.read() == told
    assert reader.read() is reader.read()


def test_a_slow_store_costs_a_bounded_wait_and_is_heard_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    first = tell_scale(str(tmp_path), 2)
    reader = ControlReader(str(tmp_path), limit_s=0.05)
    while reader.read() != first:  # on a busy machine the first look may take longer
        time.sleep(0.01)
    caplog.clear()
    answer, looks = threading.Event(), []

    def read_late(run_dir: str, known: Controls) -> Controls:
        looks.append(1)
        assert answer.wait(20)
        return read_controls(run_dir, known)

    monkeypatch.setattr(nereus.control, "read_controls", read_late)
    second = tell_scale_past(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert [reader.read(), reader.read()] == [first, first]
    assert len(looks) == 1  # one look at a time, however long it takes
    assert [record.message for record in caplog.records] == [
        "control/ can't be read, what it said before still counts: no answer within 0.05 s"
    ]
    answer.set()
    deadline = time.monotonic() + 20
    while reader.read() != second:
        assert time.monotonic() < deadline


def tell_scale_past(folder: Path) -> Controls:
    """Do what `tell_scale` does, without a look."""
    record = {"scale": 1, "scale_number": 2, "drains": {}}
    (folder / "control/00000002.json").write_text(json.dumps(record))
    return Controls(2, 1, 2)


def test_damage_or_a_store_that_is_gone_leaves_a_job_with_what_it_knew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    told = tell_scale(str(tmp_path), 2)
    reader = ControlReader(str(tmp_path))
    assert reader.read() == told
    (tmp_path / "control/00000002.json").write_text("{")
    with caplog.at_level(logging.WARNING):
        assert [reader.read(), reader.read()] == [told, told]
    assert len(caplog.records) == 1 and "00000002.json is damaged" in caplog.text
    (tmp_path / "control/00000002.json").unlink()
    assert tell_scale(str(tmp_path), 1) == reader.read()
