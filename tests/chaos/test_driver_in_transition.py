"""A driver that is killed in the midst of a transition: the run is resumed and ends as the undisturbed one does."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.chaos.doom import TRANSITION_MOMENTS, Doom
from tests.chaos.outcome import Outcome, assert_same
from tests.chaos.runs import TREE, ChaosRun, Make, uniform
from tests.chaos.scenarios import SCENARIOS

pytestmark = pytest.mark.long

NUM_KILLS = int(os.environ.get("NEREUS_CHAOS", "0"))
# There and back, and there again: what moves, and what a staged set of its own is written for. A run that is resumed
# from the commit right before a change begins on the new plan: it takes as many changes as there are kills.
MOVE, OWN_SET = SCENARIOS["move"], SCENARIOS["own set"]
SCHEDULES = {
    "direct": [[step, MOVE.after if step % 2 else MOVE.before] for step in range(6)],
    "staged": [[0, OWN_SET.before], [1, OWN_SET.after], [3, OWN_SET.before], [5, OWN_SET.after]],
}
EVERY = {"direct": 1, "staged": 4}
PHASES = ("before", "after")
PAIRS = list(zip(TRANSITION_MOMENTS[::2], TRANSITION_MOMENTS[1::2], strict=True))
# One of each graph: early, and when the plan is put in force.
SHORT = {
    "direct": [Doom("putting in force", "before", "driver")],
    "staged": [Doom("primitive", "after", "driver", count=2)],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = ChaosRun(str(folder / "run"), folder / "scratch", "float64")
    run.launch(uniform(dp=1, tp=1, pp=1))
    return run.read_outcome()


def changes_of(transport: str) -> Mapping[str, Any]:
    return {"transport": transport, "staging": {**TREE["staging"], "every": EVERY[transport]}}


@pytest.mark.skipif(NUM_KILLS > 0, reason="the long form covers it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", SCHEDULES)
def test_a_killed_driver_is_resumed(transport: str, make_run: Make, undisturbed: Outcome):
    kill_and_finish(make_run("local", "float64"), transport, SHORT[transport], undisturbed)


@pytest.mark.skipif(NUM_KILLS == 0, reason="long; NEREUS_CHAOS=60 runs it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", SCHEDULES)
@pytest.mark.parametrize("moments", PAIRS, ids=" and ".join)
def test_a_driver_killed_at_each_moment(moments: Sequence[str], transport: str, make_run: Make, undisturbed: Outcome):
    dooms = [Doom(moment, phase, "driver") for moment in moments for phase in PHASES]
    kill_and_finish(make_run("local", "float64"), transport, dooms, undisturbed)


def kill_and_finish(run: ChaosRun, transport: str, dooms: Sequence[Doom], base: Outcome) -> None:
    schedule, changes = SCHEDULES[transport], changes_of(transport)
    for doom in dooms:
        launch = run.launch(schedule, doom, changes)
        assert launch.struck, f"the run did not come to: {doom}"
        run.check_commits()
    run.launch(schedule, None, changes)
    run.check_nothing_left()
    assert_same(run.read_outcome(), base, bitwise=False)
