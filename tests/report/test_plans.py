"""Plans with what they took, and the run against its first plan."""

import pytest

from nereus.report.plans import (
    compare_with_first_plan,
    describe_first_plan,
    describe_ids,
    describe_plan,
    describe_ranges,
    split_by_plan,
)
from tests.report.sample_run import ALONE, FIRST, LONGER, SampleRun


def line(step: int, total: float, current: float, initial: float | None, **more) -> dict:
    return {"step": step, "plan": FIRST.to_record(), "seconds": {"total": total, "transition": 0.5 if step else 0.0},
            "devices_present": [0, 1], "predicted_s": {"current": current, "initial": initial}} | more  # fmt: skip


def test_the_first_plan_would_have_taken_what_was_measured_times_the_predicted_ratio():
    history = [line(0, 2.0, 1.0, 1.0), line(1, 2.5, 2.0, 3.0), line(2, 1.5, 1.0, 1.0, devices_present=[0]),
               line(3, 3.5, 2.0, None), line(4, 2.5, 1.0, 2.0), line(5, 9.0, None, 1.0),
               line(6, 1.0, 1.0, None)]  # fmt: skip
    compared = compare_with_first_plan(history)
    assert compared is not None
    assert compared.first_plan_s == (2.0, pytest.approx(3.0), None, None, pytest.approx(4.0), None, None)
    assert (compared.steps, compared.measured_s, compared.total_s) == ((0, 1, 4), 7.0, pytest.approx(9.0))
    assert (compared.outgrown_at, compared.without_devices) == (3, (2,))
    text = describe_first_plan(compared)
    assert "Steps 0-1, 4 took 7.0 s" in text and "9.0 s (predicted), 1.29 times" in text
    assert "not all there at 1 step." in text and "From step 3 on it no longer fits memory" in text


def test_of_the_first_step_nothing_was_predicted_but_it_ran_on_the_first_plan():
    first = {key: value for key, value in line(0, 2.0, 1.0, 1.0).items() if key != "predicted_s"}
    compared = compare_with_first_plan([first, line(1, 2.5, 2.0, 3.0)])
    assert compared is not None and compared.first_plan_s == (2.0, pytest.approx(3.0))
    assert compared.outgrown_at is None
    (plan,) = split_by_plan([first | {"seconds": {"total": 9.0, "transition": 0.0}}, line(1, 2.5, 3.0, 3.0)])
    assert (plan.mean_s, plan.mean_predicted_s, plan.error) == (2.0, 3.0, pytest.approx(0.5))


def test_without_predictions_nothing_is_compared():
    assert compare_with_first_plan([{"step": 0, "plan": {}, "seconds": {"total": 1.0}}]) is None
    nothing = compare_with_first_plan([line(0, 1.0, 1.0, None)])
    assert nothing is not None and "could have run none of the steps" in describe_first_plan(nothing)


def test_every_plan_has_its_steps_and_its_error():
    plans = split_by_plan(SampleRun().metrics)
    assert [plan.steps for plan in plans] == [[*range(8)], [8, 9], [*range(10, 19)], [*range(19, 24)], [*range(24, 28)]]
    assert all(0 < plan.error < 0.2 for plan in plans if plan.error is not None)
    one, two = split_by_plan([line(0, 2.0, 1.0, 1.0), line(1, 2.5, 3.0, 3.0), line(2, 2.5, 9.0, 9.0) | {
        "plan": ALONE.to_record(), "predicted_s": {}}])  # fmt: skip
    assert (one.mean_s, one.mean_predicted_s, one.error) == (2.0, 2.0, pytest.approx(0.5))
    assert (two.mean_predicted_s, two.error) == (None, None)


def test_plans_and_numbers_in_few_words():
    assert describe_plan(FIRST.to_record()) == "all model-stages 2x1x1 on 0,1"
    assert describe_plan(LONGER.to_record()) == "actor.generation 1x2x1 on 0,1; all others 2x1x1 on 0,1"
    assert describe_plan({}) == "not known"
    assert describe_ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert describe_ranges(range(0, 20, 2)) == "0, 2, 4, 6 and 6 more"
    assert (describe_ids([1, 0]), describe_ids(range(1024))) == ("1,0", "0-1023")
