"""Device traces from config and files, as a run takes them."""

import json
from pathlib import Path

import pytest

from nereus.config import DeviceFile
from nereus.trace_files import read_device_trace

CSV = "seconds,available\n0,2\n300,1\n600,1\n900,0\n"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("NEREUS_TRACES", raising=False)
    path = tmp_path / "trace.csv"
    path.write_text(CSV)
    return str(path)


def test_without_a_trace_there_is_none():
    assert read_device_trace(None, num_steps=5, num_devices=2) == ()


def test_a_list_is_taken_as_it_is_where_it_changes_something():
    """Entries beyond the last step stay: the run may be made longer, or go on after an end."""
    entries = ((0, 2), (3, 0), (4, 0), (9, 1), (12, 1))
    assert read_device_trace(entries, num_steps=5, num_devices=2) == ((0, 2), (3, 0), (9, 1))


def test_a_file_is_spread_over_the_steps(trace: str):
    assert read_device_trace(trace, num_steps=8, num_devices=2) == ((0, 2), (2, 1), (6, 0))
    fitted = DeviceFile(file=trace, scale=2, min=1, max=3, span_s=600)
    assert read_device_trace(fitted, num_steps=4, num_devices=4) == ((0, 3), (2, 2))


def test_a_file_may_lie_in_the_folder_of_traces_or_in_a_store(trace: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NEREUS_TRACES", str(Path(trace).parent))
    assert read_device_trace("trace.csv", num_steps=4, num_devices=2) == ((0, 2), (1, 1), (3, 0))
    assert read_device_trace(f"file://{trace}", num_steps=2, num_devices=2) == ((0, 2), (1, 1))


def test_a_spot_trace(trace: str):
    path = Path(trace).with_suffix(".json")
    path.write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": [1, 4, 2]}))
    assert read_device_trace(str(path), num_steps=3, num_devices=4) == ((0, 1), (1, 4), (2, 2))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gone.csv", None, "drift.devices is '"),
        ("t.csv", "time,available\n0,3\n", "drift.devices: t.csv has no column `seconds`"),
        ("t.csv", "seconds,available\n0,3\n300,x\n", "drift.devices: t.csv has a line that is no numbers"),
        ("t.csv", "seconds,available\n0,0\n", "drift.devices: t.csv has 0 devices for ever"),
        ("t.json", "{}", "drift.devices: t.json is no spot trace"),
        (
            "t.csv",
            "seconds,available\n0,3\n",
            "has 3 devices at step 0, but cluster.devices is 2; raise it, or cut",
        ),
        ("t.csv", b"\xff\xfe", "drift.devices: trace "),
    ],
)
def test_wrong_files_are_refused_in_one_sentence(trace: str, name: str, text: str | bytes | None, message: str):
    path = Path(trace).with_name(name)
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"^drift.devices") as refused:
        read_device_trace(str(path), num_steps=4, num_devices=2)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_credentials_stay_out_of_the_config():
    with pytest.raises(ValueError, match="was given with credentials in it"):
        read_device_trace("s3://key:secret@bucket/t.csv", num_steps=4, num_devices=2)
