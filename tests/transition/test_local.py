"""One model-stage's change: what stays, what is made together, and what must be converted together in place."""

import pytest

from nereus.plan import MODEL_STAGES, Plan
from nereus.transition.local import by_stage, closure, sides_of, stage_changes, users_of
from tests.transition.cases import stage

TRAINING = "actor.training"


def change_of(before, after, lost=frozenset()):
    (change,) = stage_changes(sides_of(Plan.of({TRAINING: before}), Plan.of({TRAINING: after})), lost)
    return change


def test_ties_are_broken_by_stage():
    plan = Plan.of({name: stage(1, 1, 1) for name in MODEL_STAGES})
    assert by_stage(plan) == [
        "actor.generation",
        "reference.inference",
        "reward.inference",
        "actor.training",
        "critic.training",
    ]


def test_units_of_both_plans_stay():
    change = change_of(stage(3, 2, 1), stage(3, 2, 1, [4, 5, 6, 7, 0, 1]))
    assert [unit.devices for unit in change.kept] == [(4, 5), (0, 1)]
    assert [unit.devices for unit in change.old] == [(2, 3)]
    (transfer,) = change.transfers
    assert transfer.kind == "extend" and transfer.makes[0].devices == (6, 7) and transfer.overlaps == ()


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        # One unit is cut up: all parts at once.
        (stage(1, 4, 1), stage(2, 2, 1), [("split", 2, (0,))]),
        (stage(1, 2, 2), stage(4, 1, 1), [("split", 4, (0,))]),
        (stage(2, 4, 1), stage(4, 2, 1), [("split", 2, (0,)), ("split", 2, (1,))]),
        # Several units become one.
        (stage(4, 1, 1), stage(2, 2, 1), [("merge", 1, (0, 1)), ("merge", 1, (2, 3))]),
        (stage(4, 1, 1), stage(1, 2, 2), [("merge", 1, (0, 1, 2, 3))]),
        # Neither layout divides the other.
        (stage(1, 3, 1), stage(1, 1, 2), [("reshard", 1, (0,))]),
        (stage(2, 3, 1), stage(3, 1, 2), [("reshard", 1, (0,)), ("reshard", 1, (0, 1)), ("reshard", 1, (1,))]),
        # Partly on new devices, or on new ones only; what can be copied at once comes first.
        (stage(1, 2, 1), stage(1, 2, 1, first=1), [("move", 1, (0,))]),
        (stage(1, 2, 1), stage(1, 1, 4), [("reshard", 1, (0,))]),
        (stage(1, 2, 1), stage(4, 1, 1), [("split", 2, (0,)), ("extend", 1, ()), ("extend", 1, ())]),
    ],
)
def test_what_is_made_together(before, after, expected):
    transfers = change_of(before, after).transfers
    assert sorted((t.kind, len(t.makes), t.overlaps) for t in transfers) == sorted(expected)
    assert [t.kind for t in transfers] == [kind for kind, _, _ in expected]


def test_units_with_a_lost_device_are_dead():
    change = change_of(stage(3, 2, 1), stage(2, 2, 1, [0, 1, 4, 2]), lost={3})
    assert [unit.devices for unit in change.dead] == [(2, 3)]
    assert [unit.devices for unit in change.old] == [(4, 5)] and [unit.devices for unit in change.kept] == [(0, 1)]
    assert [(t.kind, t.overlaps) for t in change.transfers] == [("move", (0,))]


def test_what_hangs_together_is_converted_together():
    """tp 2 to tp 3 on six devices: a chain through all units; without its middle, two pieces."""
    change = change_of(stage(3, 2, 1), stage(2, 3, 1))
    users = users_of(change)
    assert users == {0: [0], 1: [0, 1], 2: [1]}
    assert closure(0, change, users, {0, 1}, {0, 1, 2}) == ([0, 1], [0, 1, 2])
    assert closure(0, change, users, {0, 1}, {0, 2}) == ([0], [0])
    assert closure(1, change, users, {1}, {0, 1, 2}) == ([1], [1, 2])
