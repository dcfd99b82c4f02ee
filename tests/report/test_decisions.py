"""Decisions for people."""

import pytest

from nereus.report.decisions import (
    decision_rows,
    describe_decision,
    describe_move,
    describe_places,
    describe_settings,
    describe_target,
    format_s,
    match_moves,
)
from tests.report.sample_run import ALONE, FIRST, LONGER, TIGHT, SampleRun


@pytest.fixture(scope="module")
def run() -> SampleRun:
    return SampleRun()


def test_every_change_finds_its_decision(run: SampleRun):
    moves = match_moves(run.decisions, run.transitions)
    assert [(move.step, move.kind, move.is_retry) for move in moves] == [
        (7, "undone", False), (8, "admit", True), (10, "urgent", False), (19, "admit", False), (24, "urgent", False)
    ]  # fmt: skip
    assert moves[1].decision is run.decisions[1]
    assert [move.kind for move in match_moves([], run.transitions[2:])] == ["scheduled"] * 3
    again = [dict(run.transitions[1], step=7)]  # at once, at the same step
    assert [move.is_retry for move in match_moves(run.decisions, run.transitions[:1] + again)] == [False, True]
    rebuilt = dict(run.transitions[1], step=9, **{"from": run.transitions[1]["to"]})
    (move,) = match_moves(run.decisions, [rebuilt])
    assert (move.kind, move.decision) == ("rebuilt", None)
    assert describe_move(move).startswith("The same plan is built again after a loss: 12.00 MiB")
    refused = [dict(run.decisions[1], verdict="refuse")]
    assert match_moves(refused, run.transitions[1:2])[0].decision is None


def test_a_plan_that_the_run_was_built_again_on_is_not_told_of_as_undone(run: SampleRun):
    line = dict(run.transitions[2], outcome="recovered", reason="device 0 was lost")
    kinds = [match_moves(run.decisions, [dict(line, in_force=plan)])[0].kind for plan in ("to", "from")]
    assert kinds == ["urgent", "undone"]


def test_a_decision_in_words(run: SampleRun):
    assert describe_decision(run.decisions[2]).startswith("urgent before step 10: The plan needs devices that are gone")


def test_what_moves_is_named_together():
    first, longer, alone = (plan.to_record() for plan in (FIRST, LONGER, ALONE))
    assert describe_places(first, longer) == "actor.generation 2x1x1 on 0,1 -> 1x2x1 on 0,1"
    assert describe_places(first, alone) == "all model-stages 2x1x1 on 0,1 -> 1x1x1 on 0"
    assert describe_places(longer, alone) == (
        "actor.generation 1x2x1 on 0,1 -> 1x1x1 on 0; "
        "actor.training, critic.training, reference.inference 2x1x1 on 0,1 -> 1x1x1 on 0"
    )
    assert describe_places(first, first) == ""


def test_a_change_of_settings_alone_is_a_target_too(run: SampleRun):
    tight = TIGHT.to_record()
    eased = TIGHT.with_stage("actor.training", micro_batch=1, recompute=False).to_record()
    assert describe_settings(tight, eased) == "actor.training micro-batch 2 -> 1, no recompute"
    record = dict(run.decisions[2], current=tight, candidate=eased)
    assert describe_target(record) == describe_settings(tight, eased)
    assert describe_target(dict(record, verdict="keep")) == "none"


def test_predictions_stand_beside_what_was_measured(run: SampleRun):
    rows = decision_rows(run.decisions, run.transitions)
    assert len(rows) == 7 and len({tuple(row) for row in rows}) == 1
    refused, undone, urgent, kept = rows[:4]
    # Of a plan that stayed in force the prediction is its own, not the candidate's.
    assert refused["measured"] == "1.90 s (+7%)" and refused["measured move"] == ""
    assert undone["measured"] == "1.98 s (+2%)" and undone["measured move"] == "0.44 s"
    assert urgent["measured"] == "3.54 s (-3%)" and urgent["step now"] == urgent["payback"] == ""
    assert (kept["candidate"], kept["move"], kept["payback"]) == ("none", "", "")
    assert (refused["move"], refused["payback"]) == ("1.20 s direct", "2.5 of 4 steps")


def test_what_is_not_known_yet_is_left_empty(run: SampleRun):
    record = {key: value for key, value in run.decisions[1].items() if key != "measured"}
    record |= {"transition_s": {"direct": None, "staged": 2.0}, "payback_steps": None}
    (row,) = decision_rows([record])
    assert (row["measured"], row["measured move"], row["move"], row["payback"]) == ("", "", "2.00 s staged", "")


def test_seconds_have_about_three_digits():
    assert [format_s(s) for s in (None, 0.0123, 0.5, 12.34, 12345.6)] == ["", "0.012 s", "0.50 s", "12.3 s", "12,346 s"]
