"""Which devices there are at each boundary: trace, `scale`, drains, notices, and what a resumed run makes of 0."""

import pytest

from nereus.supply import Controls, DeviceSupply

TRACE = ((0, 2), (6, 1), (12, 2))


def counts(supply: DeviceSupply, steps: range, controls: Controls | None = None) -> list[int]:
    return [len(supply.at(step, controls).present) for step in steps]


def test_without_a_trace_all_devices_are_there():
    supply = DeviceSupply(3).at(7)
    assert (supply.present, dict(supply.leaving), supply.reason) == ((0, 1, 2), {}, "all 3 devices")


def test_an_entry_holds_from_its_step_on_and_what_it_takes_can_still_be_read():
    supply = DeviceSupply(3, TRACE)
    assert counts(supply, range(0, 14, 2)) == [2, 2, 2, 1, 1, 1, 2]
    at = supply.at(6)
    assert (at.present, at.leaving) == ((0,), {1: None, 2: None})
    assert at.reason == "1 of 3 devices: the trace has 1 from step 6 on"


def test_a_scale_holds_until_the_next_entry_of_the_trace_or_the_next_scale():
    supply = DeviceSupply(4, TRACE)
    said = Controls(number=1, scale=3, scale_number=1)
    assert counts(supply, range(2, 4)) == [2, 2]
    assert counts(supply, range(4, 8), said) == [3, 3, 1, 1]
    said = Controls(number=2, scale=4, scale_number=2)
    assert supply.at(8, said).reason == "all 4 devices: `nereus scale` said 4 at step 8"
    assert counts(supply, range(8, 14), said) == [4, 4, 4, 4, 2, 2]


def test_a_scale_beats_the_entry_of_the_boundary_at_which_it_is_read():
    assert counts(DeviceSupply(4, TRACE), range(6, 8), Controls(1, 3, 1)) == [3, 3]


def test_a_drained_device_is_away_whatever_the_trace_says():
    drained = Controls(number=2, scale=2, scale_number=1, drains={0: 36_930.0})
    supply = DeviceSupply(3, TRACE)
    at = supply.at(3, drained)
    assert (at.present, at.leaving) == ((1,), {0: 36_930.0, 2: None})
    assert (
        at.reason == "1 of 3 devices: `nereus scale` said 2 at step 3; device 0 is drained, which goes at 10:15:30 UTC"
    )
    assert supply.at(12, drained).present == (1,)
    assert supply.at(13, Controls(number=3, scale=2, scale_number=3)).present == (0, 1)


def test_the_trace_counts_a_drained_device():
    """It says which ids are there, not how many are wanted."""
    assert DeviceSupply(3, ((0, 2),)).at(0, Controls(1, drains={1: None})).present == (0,)


def test_a_notice_and_a_quarantine():
    at = DeviceSupply(4).at(5, noticed={1}, quarantined={2, 3})
    assert (at.present, at.leaving) == ((0,), {1: None})
    assert at.reason == (
        "1 of 4 devices: device 1 was given notice by SIGTERM; device 2 died too often; device 3 died too often"
    )
    at = DeviceSupply(2).at(5, Controls(1, drains={1: 5.0, 9: None}), noticed={1}, quarantined={9})
    assert (at.present, at.leaving) == ((0,), {1: 5.0})  # with two announcements the one that names a time counts
    assert DeviceSupply(2).at(6).present == (0, 1)
    assert DeviceSupply(2).at(5, Controls(1, drains={1: None}), quarantined={1}).leaving == {}  # nothing left to read


def test_fewer_devices_than_were_scaled_to_may_be_resumed_on():
    assert DeviceSupply(2).at(0, Controls(1, 4, 1)).present == (0, 1)


def test_the_same_question_has_the_same_answer():
    """A step that is repeated after a loss, or an earlier one, is asked for again."""
    supply, said = DeviceSupply(4, TRACE), Controls(1, 3, 1)
    first = supply.at(8, said)
    assert supply.at(8, said) == first
    assert len(supply.at(5, said).present) == 3
    assert supply.at(8, said) == first


@pytest.mark.parametrize(
    ("trace", "after"),
    [
        (((0, 2), (6, 0), (9, 1), (12, 2)), [1, 1, 1, 1, 1, 1, 2]),
        (((0, 2), (6, 0), (7, 0), (9, 1), (12, 2)), [1, 1, 1, 1, 1, 1, 2]),
        (((0, 2), (6, 0)), [2] * 7),
        (((0, 0), (9, 1)), [1] * 7),
        (((0, 2), (6, 0), (8, 1), (9, 0)), [1, 1, 1, 0, 0, 0, 0]),
    ],
)
def test_a_resumed_run_goes_on_with_the_entry_after_the_one_that_ended_it(trace: tuple, after: list[int]):
    ended = DeviceSupply(2, trace)
    assert ended.at(6).present == ()
    supply = DeviceSupply.from_record(
        DeviceSupply(2, trace).to_record(), 2, trace
    )  # of the commit before that boundary
    supply.begin_again(6)
    assert counts(supply, range(6, 13)) == after
    again = DeviceSupply.from_record(supply.to_record(), 2, trace)
    again.begin_again(8)
    assert counts(again, range(8, 9)) == after[2:3]


def test_each_end_of_a_trace_is_over_in_turn():
    trace = ((0, 2), (3, 0), (5, 1), (8, 0), (9, 2))
    supply = DeviceSupply(2, trace)
    assert counts(supply, range(4)) == [2, 2, 2, 0]
    supply.begin_again(3)
    assert counts(supply, range(3, 9)) == [1, 1, 1, 1, 1, 0]
    supply = DeviceSupply.from_record(supply.to_record(), 2, trace)
    supply.begin_again(8)
    assert counts(supply, range(8, 11)) == [2, 2, 2]


def test_a_run_that_was_killed_elsewhere_has_not_passed_an_end():
    supply = DeviceSupply(2, ((0, 2), (6, 0), (9, 1)))
    supply.begin_again(5)
    assert counts(supply, range(5, 7)) == [2, 0]


def test_a_scale_counts_while_an_entry_holds_before_its_step():
    supply = DeviceSupply(4, ((0, 2), (6, 0), (9, 1), (12, 2)))
    supply.begin_again(6)
    assert counts(supply, range(6, 8)) == [1, 1]
    said = Controls(1, 3, 1)
    assert counts(supply, range(8, 9), said) == [3]
    again = DeviceSupply.from_record(supply.to_record(), 4, ((0, 2), (6, 0), (9, 1), (12, 2)))
    again.begin_again(8, said)
    for one in (supply, again):
        assert counts(one, range(8, 13), said) == [3, 3, 3, 3, 2]


def test_a_scale_to_nothing_ends_a_run_once():
    said = Controls(number=1, scale=0, scale_number=1)
    supply = DeviceSupply(2, TRACE)
    assert supply.at(7, said).reason == "0 of 2 devices: `nereus scale` said 0 at step 7"
    again = DeviceSupply.from_record(DeviceSupply(2, TRACE).to_record(), 2, TRACE)
    again.begin_again(7, said)
    assert counts(again, range(7, 9), said) == [1, 1]
    assert again.at(9, Controls(number=2, scale=0, scale_number=2)).present == ()


def test_what_was_heard_survives_a_restart():
    said = Controls(1, 1, 1)
    supply = DeviceSupply(2, TRACE)
    supply.at(2, said)
    again = DeviceSupply.from_record(supply.to_record(), 2, TRACE)
    assert counts(again, range(3, 13), said) == [1] * 9 + [2]
    assert counts(DeviceSupply.from_record(again.to_record(), 2, TRACE), range(12, 14), said) == [2, 2]
