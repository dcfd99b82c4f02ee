"""Deaths of workers: which restart waits how long, and which device is used no more."""

import pytest

from nereus.runtime.deaths import Deaths


def test_each_restart_of_a_device_waits_longer_up_to_the_longest() -> None:
    deaths = Deaths()
    assert [deaths.take_wait_s(3) for _ in range(5)] == [1.0, 2.0, 4.0, 4.0, 4.0]
    assert deaths.take_wait_s(0) == 1.0


@pytest.mark.parametrize(
    ("steps", "is_quarantined"),
    [
        ((0, 5), False),
        ((0, 5, 9), True),
        ((0, 5, 10), False),
        ((0, 5, 10, 14), True),
        ((4, 4, 4), True),
        ((7, 7, 0), True),  # the run went back to its start
        ((0, 50, 100, 105), False),
        ((5, None, 6, None), False),
        ((0, 1, 2, 100), True),  # for ever
    ],
)
def test_three_deaths_within_ten_steps_quarantine_a_device(steps: tuple[int | None, ...], is_quarantined: bool) -> None:
    deaths = Deaths()
    for step in steps:
        deaths.note(1, step)
        deaths.note(2, None)
    assert deaths.is_quarantined(1) == is_quarantined and not deaths.is_quarantined(2)
