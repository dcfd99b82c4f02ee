"""Runs under control that are disturbed again and again come to what an undisturbed one on one plan comes to.

Devices drain, die, return and are given notice, memory runs out, drivers are killed: in steps and in changes of the
plan. A short form for every long test run; `NEREUS_CHAOS=60` disturbs 30 runs instead, and prints a table. A run that
failed is repeated by `NEREUS_CHAOS_SEED=` with the seed that was printed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from tests.chaos.adapted import AdaptedRun, Story
from tests.chaos.disturbances import KINDS, MOVE_POINTS
from tests.chaos.outcome import Outcome, assert_same
from tests.chaos.shared_memory import leaked_files, shared_files

pytestmark = pytest.mark.long

NUM_RUNS = int(os.environ.get("NEREUS_CHAOS", "0")) // 2
SEED = os.environ.get("NEREUS_CHAOS_SEED")
# Two that see all kinds: in a step and in a change of the plan.
SHORT_SEEDS = (7, 13)
MOST_KILLS_A_RUN = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    run = AdaptedRun(tmp_path_factory.mktemp("undisturbed"))
    run.run_fixed()
    return run.read_outcome()


def disturb(folder: Path, seed: int, base: Outcome) -> Story:
    """Let a run live through what a seed has for it, and hold it against the undisturbed one."""
    rng, before = random.Random(seed), shared_files()
    run = AdaptedRun(folder)
    story = run.live_through(rng, num_kills=rng.randint(0, MOST_KILLS_A_RUN))
    assert_same(run.read_outcome(), base, bitwise=False)
    assert not story.unforced, f"memory ran out although nobody had used it up: {story.unforced}; met {story.met}"
    assert not leaked_files(before), "left in shared memory"
    return story


@pytest.mark.skipif(NUM_RUNS > 0 and SEED is None, reason="the long form covers it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", SHORT_SEEDS if SEED is None else [int(SEED)])
def test_disturbances_leave_no_trace(number: int, undisturbed: Outcome, tmp_path: Path):
    print(disturb(tmp_path, number, undisturbed))


@pytest.mark.skipif(NUM_RUNS == 0 or SEED is not None, reason="long; NEREUS_CHAOS=60 runs it")
@pytest.mark.timeout(300 * max(NUM_RUNS, 1))
def test_many_disturbed_runs(undisturbed: Outcome, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]):
    stories, failed = [], {}
    for number in range(seed, seed + NUM_RUNS):
        try:
            story = disturb(tmp_path / str(number), number, undisturbed)
            stories.append(story)
            outcome = f"same result: {story}"
        except Exception as error:  # all that may go wrong belongs into the table
            failed[number] = f"{type(error).__name__}: {error}"
            outcome = f"FAILED, repeat it by NEREUS_CHAOS_SEED={number}: {failed[number]}"
        with capsys.disabled():
            print(f"{number}: {outcome}", flush=True)
    with capsys.disabled():
        print_table(stories)
    assert not failed, f"seeds that failed: {sorted(failed)}"
    if len(stories) >= 10:  # enough for each kind, in a step and in a change of the plan
        assert {*counts(stories)} == {(kind, where) for kind in KINDS for where in ("step", "change of the plan")}


def counts(stories: Iterable[Story]) -> Counter[tuple[str, str]]:
    """Return how many disturbances were met, by kind and where."""
    places = {True: "change of the plan", False: "step"}
    return Counter((one["kind"], places[one["point"] in MOVE_POINTS]) for story in stories for one in story.met)


def print_table(stories: list[Story]) -> None:
    met = counts(stories)
    table = Table(title=f"{sum(met.values())} disturbances of {len(stories)} runs", title_justify="left")
    for column in ("kind", "in a", "number"):
        table.add_column(column, justify="right" if column == "number" else "left")
    for (kind, where), count in sorted(met.items()):
        table.add_row(kind, where, str(count))
    Console(width=120).print(table)
