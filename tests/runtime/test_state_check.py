"""The first step after a change of the plan is held against what exact copies give; others only say what is usual."""

import math

import pytest

from nereus.runtime.state_check import StateAlarm, StateCheck


def line(gap: float, error: float = 0.0) -> dict[str, float]:
    return {"step": 4, "generation_logprob_gap_max": gap, "first_ratio_max_error": error}


@pytest.mark.parametrize(
    ("precision", "gap", "error"),
    [
        ("float64", 2e-9, 0.0),
        ("float64", 0.0, 2e-9),
        ("float32", 2e-3, 0.0),
        ("float32", 0.0, 2e-3),
        ("float32", math.nan, 0.0),
    ],
)
def test_what_no_exact_copy_gives_is_an_alarm_after_a_change_only(precision: str, gap: float, error: float) -> None:
    check = StateCheck(precision)
    check.check(line(gap, error), is_first=False)
    with pytest.raises(StateAlarm, match="step 4, the first after a change of the plan"):
        check.check(line(gap, error), is_first=True)


def test_in_bfloat16_three_times_the_largest_gap_before_is_right() -> None:
    check = StateCheck("bfloat16")
    check.check(line(0.5), is_first=True)  # nothing is known yet
    check.check(line(0.02), is_first=False)
    check.check(line(1.4), is_first=True)
    with pytest.raises(StateAlarm):
        check.check(line(4.3), is_first=True)
