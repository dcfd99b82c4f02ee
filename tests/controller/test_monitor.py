"""Crossings, references and horizons of the monitor."""

import pytest

from nereus.controller.monitor import LENGTH, POOL, Monitor, Signals, Thresholds, describe_cap


def length(tokens: float) -> Signals:
    return Signals(response_tokens=tokens)


def test_the_first_look_sets_references_and_crosses_nothing():
    assert Monitor().find_triggers(0, length(100), (0, 1)) == ()


@pytest.mark.parametrize(("tokens", "crosses"), [(129, False), (131, True), (71, False), (69, True)])
def test_length_crosses_at_three_tenths(tokens: float, crosses: bool):
    monitor = Monitor()
    monitor.find_triggers(0, length(100), (0,))
    assert monitor.find_triggers(1, length(tokens), (0,)) == ((LENGTH,) if crosses else ())


def test_references_move_only_when_they_are_reset():
    monitor = Monitor()
    monitor.find_triggers(0, length(100), (0,))
    assert monitor.find_triggers(1, length(120), (0,)) == ()
    assert monitor.find_triggers(2, length(140), (0,)) == (LENGTH,)
    assert monitor.find_triggers(3, length(140), (0,)) == (LENGTH,)
    monitor.reset_references(length(140))
    assert monitor.find_triggers(4, length(140), (0,)) == ()


def test_efficiency_of_a_class_and_speed_of_a_device_cross_at_two_tenths():
    monitor = Monitor()
    monitor.find_triggers(0, Signals(efficiency={"gemm": 0.5, "decode": 0.5}), (0,))
    drifted = Signals(efficiency={"gemm": 0.39, "decode": 0.41}, device_factor={3: 1.25, 4: 1.1})
    assert monitor.find_triggers(1, drifted, (0,)) == ("efficiency of gemm", "speed of device 3")


def test_an_unsure_efficiency_crosses_nothing_until_it_is_sure():
    monitor = Monitor()
    monitor.find_triggers(0, Signals(efficiency={"decode": 0.4}, unsure=frozenset({"decode"})), (0,))
    moved = Signals(efficiency={"decode": 0.8}, unsure=frozenset({"decode"}))
    assert monitor.find_triggers(1, moved, (0,)) == ()
    assert monitor.find_triggers(2, Signals(efficiency={"decode": 0.8}), (0,)) == ("efficiency of decode",)
    monitor.reset_references(moved)
    assert monitor.find_triggers(3, Signals(efficiency={"decode": 0.8}), (0,)) == ()


def test_a_slow_device_that_recovers_crosses_again():
    monitor = Monitor()
    slow = Signals(device_factor={3: 2.0})
    monitor.find_triggers(0, Signals(), (0,))
    assert monitor.find_triggers(1, slow, (0,)) == ("speed of device 3",)
    monitor.reset_references(slow)
    assert monitor.find_triggers(2, slow, (0,)) == ()
    assert monitor.find_triggers(3, Signals(), (0,)) == ("speed of device 3",)


def test_the_horizon_is_one_before_the_first_interval_then_a_moving_average():
    monitor = Monitor()
    monitor.find_triggers(0, Signals(), (0,))
    horizons = []
    for step, pool in ((2, (0, 1)), (8, (0,)), (10, (0, 1)), (12, (0,))):
        assert monitor.find_triggers(step, Signals(), pool) == (POOL,)
        horizons.append(monitor.horizon([POOL]))
    assert horizons == [1.0, 6.0, 4.0, 3.0]


def test_of_several_triggers_the_smallest_horizon_counts():
    monitor = Monitor()
    monitor.find_triggers(0, Signals(), (0,))
    monitor.find_triggers(1, Signals(), (0, 1))
    monitor.find_triggers(9, Signals(), (0,))
    assert monitor.horizon([POOL]) == 8.0
    assert monitor.horizon([POOL, LENGTH]) == 1.0


def test_a_record_holds_all_of_the_state():
    monitor = Monitor(Thresholds(length=0.1))
    for step in range(6):
        monitor.find_triggers(step, Signals(100 + 20 * step, 5e9, {"gemm": 0.5}, {2: 1.3}), (0, step))
    again = Monitor.from_record(monitor.to_record(), Thresholds(length=0.1))
    assert again.to_record() == monitor.to_record()
    assert again.find_triggers(6, length(100), (0,)) == monitor.find_triggers(6, length(100), (0,)) == (POOL,)


def test_responses_at_the_cap_are_called_a_training_problem():
    assert describe_cap(0.5, 4096) is None
    warning = describe_cap(0.51, 4096)
    assert warning is not None and "training problem" in warning and "4096" in warning


def test_a_boundary_that_is_looked_at_again_ends_no_interval():
    monitor = Monitor()
    for step in (10, 30, 30, 30):
        monitor.note_crossing(POOL, step)
    assert monitor.horizon((POOL,)) == 20
