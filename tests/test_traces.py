"""Traces: what they say of each step, and how wrong ones are refused."""

import json

import pytest

from nereus.traces import (
    Pool,
    build_lengths,
    build_pools,
    read_devices_csv,
    read_lengths_csv,
    read_spot_trace,
    sample_pools,
)


def test_lengths_are_linear_between_points_and_constant_beyond():
    trace = build_lengths([[2, 100], [6, 300, 400]], 1.15, "lengths")
    assert [trace.mean(step) for step in (0, 2, 3, 6, 9)] == [100, 100, 150, 300, 300]
    assert trace.p95(2) == pytest.approx(115)
    assert trace.p95(6) == 400


def test_lengths_are_read_from_a_csv_with_or_without_p95():
    assert read_lengths_csv("step,mean\n0,10\n5,20\n", "x") == [[0, 10], [5, 20]]
    assert read_lengths_csv("step,mean,p95\n0,10,12\n", "x") == [[0, 10, 12]]


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "is empty"),
        ([[0, 10], [0, 20]], "out of order"),
        ([[-1, 10]], "out of order"),
        ([[0, 0]], "must be above 0"),
        ([[0, 10, 9]], "p95 not below"),
        ([[0]], r"a point is \[step, mean\]"),
    ],
)
def test_wrong_lengths_are_refused(points: list, message: str):
    with pytest.raises(ValueError, match=message):
        build_lengths(points, 1.15, "lengths")


def test_device_entries_hold_until_the_next():
    pools = build_pools([[0, 4], [2, 8], [3, 6, "lost"]], 5, "devices")
    assert pools == (Pool(4), Pool(4), Pool(8), Pool(6, lost=True), Pool(6))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[1, 4]], "says nothing of step 0"),
        ([[0, 4], [0, 5]], "out of order"),
        ([[0, -1]], "at least 0"),
        ([[0, 0]], "0 devices for ever"),
        ([[0, 4, "gone"]], "an entry is"),
    ],
)
def test_wrong_device_entries_are_refused(entries: list, message: str):
    with pytest.raises(ValueError, match=message):
        build_pools(entries, 3, "devices")


def test_a_trace_in_seconds_is_sampled_at_the_steps():
    trace = [(0.0, 7.0), (300.0, 12.0), (600.0, 2.0), (900.0, 16.0)]
    pools = sample_pools(trace, 4, "t", scale=2, least=8, most=30, span_s=1200)
    assert [pool.num_devices for pool in pools] == [14, 24, 8, 30]
    # Without a span the steps are spread over the whole trace, its last interval included.
    assert [pool.num_devices for pool in sample_pools(trace, 2, "t")] == [7, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seconds,available\n", "holds no line"),
        ("seconds,available\n-5,3\n", "negative time"),
        ("seconds,available\n0,3\n300,3\n200,3\n", "back to 200"),
        ("seconds,available\n0,-3\n", "at least 0"),
        ("seconds,available\n0,0\n300,0\n", "0 devices for ever"),
        ("time,available\n0,3\n", "no column `seconds`"),
        ("seconds,available\n0,many\n", "no numbers"),
        ("seconds,available\n0\n", "no numbers"),
        ("seconds,available\n0,inf\n", "isn't finite"),
        ("seconds,available\n0,3\nnan,3\n", "isn't finite"),
    ],
)
def test_wrong_device_files_are_refused(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        sample_pools(read_devices_csv(text, "t.csv"), 2, "t.csv")


def test_spot_traces_are_read():
    text = json.dumps({"metadata": {"gap_seconds": 300}, "data": [0, 16, 3]})
    assert read_spot_trace(text, "t.json") == [(0, 0), (300, 16), (600, 3)]
    for wrong in ("[]", "{}", json.dumps({"metadata": {"gap_seconds": 0}, "data": [1]}), "no JSON"):
        with pytest.raises(ValueError, match="gap_seconds"):
            read_spot_trace(wrong, "t.json")
    with pytest.raises(ValueError, match="isn't finite"):
        read_spot_trace('{"metadata": {"gap_seconds": 300}, "data": [NaN]}', "t.json")
