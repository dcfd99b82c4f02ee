"""A run that is killed, at any moment and in any of its processes, goes on and comes to what the undisturbed one does.

A short form for every test run; `NEREUS_CHAOS=60` draws that many kills instead, in minutes, and prints a table.
"""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from rich.console import Console
from rich.table import Table

from tests.chaos.doom import MOMENTS, PHASES, VICTIMS, Doom
from tests.chaos.outcome import Outcome, assert_same
from tests.chaos.runs import KEEP, ChaosRun, Make, Plan, draw_device, draw_plan, uniform

pytestmark = pytest.mark.long

NUM_KILLS = int(os.environ.get("NEREUS_CHAOS", "0"))
# Kills of one run; more than its steps can bear would find nothing left to do.
MOST_KILLS_A_RUN = 3
# A float32 run keeps this plan: two tensor-parallel ranks that train the actor, two replicas of the critic.
ONE_PLAN = {**uniform(dp=1, tp=2, pp=1), "critic.training": {"dp": 2, "tp": 1, "pp": 1, "devices": [1, 0]}}
STORAGES = ("local", "s3")
SAME = "same result"

Undisturbed = Callable[[str], Outcome]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """What runs come to that nobody disturbs, by precision: in float64 on one device, in float32 on ONE_PLAN."""
    outcomes: dict[str, Outcome] = {}

    def outcome_of(precision: str) -> Outcome:
        if precision not in outcomes:
            folder = tmp_path_factory.mktemp(f"undisturbed-{precision}")
            run = ChaosRun(str(folder / "run"), folder / "scratch", precision)
            run.launch(uniform(dp=1, tp=1, pp=1) if precision == "float64" else ONE_PLAN)
            run.check_nothing_left()
            outcomes[precision] = run.read_outcome()
        return outcomes[precision]

    return outcome_of


def kill(run: ChaosRun, doom: Doom, rng: random.Random) -> bool:
    """Let the run go on until its doom, on a plan of its own where the precision allows; return whether it was met."""
    plan: Plan = draw_plan(rng) if run.precision == "float64" else ONE_PLAN
    launch = run.launch(plan, replace(doom, device=draw_device(rng, plan, doom.moment)))
    run.check_commits()
    return launch.struck


def finish(run: ChaosRun, base: Outcome, rng: random.Random) -> str:
    """Let the run come to its end, check that it did so as if nothing had been, and return what the driver said."""
    launch = run.launch(draw_plan(rng) if run.precision == "float64" else ONE_PLAN)
    run.check_nothing_left()
    assert_same(run.read_outcome(), base, bitwise=run.precision == "float32")
    return launch.said


# A commit is through for sure when the step after the next one begins: from there on there is something to restore.
LOCAL_DOOMS = (
    Doom("generation", "middle", "worker", count=3, nth=3),
    Doom("journal record", "middle", "driver", count=3),
    Doom("restore", "middle", "both"),
)
S3_DOOMS = (
    Doom("training", "middle", "both", count=3),
    Doom("shard write", "middle", "driver", count=3),
)


@pytest.mark.skipif(NUM_KILLS > 0, reason="the long form covers it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("storage", "precision", "dooms"),
    [("local", "float64", LOCAL_DOOMS), pytest.param("s3", "float32", S3_DOOMS, marks=pytest.mark.s3)],
    ids=["local, any layout", "s3, one plan"],
)
def test_kills_leave_no_trace(
    storage: str,
    precision: str,
    dooms: Sequence[Doom],
    make_run: Make,
    undisturbed: Callable[[str], Outcome],
    seed: int,
):
    """On local disk the newest commit is damaged, too, before the run goes on to its end."""
    rng = random.Random(seed)
    run = make_run(storage, precision)
    for doom in dooms:
        assert kill(run, doom, rng), f"the run did not come to: {doom}"
    before = run.damage_newest(rng) if storage == "local" else None
    said = finish(run, undisturbed(precision), rng)
    if before is not None:
        assert "is damaged" in said and f"The run goes on from step {before.step}, the newest commit" in said


# The long form


@pytest.mark.skipif(NUM_KILLS == 0, reason="long; NEREUS_CHAOS=60 runs it")
@pytest.mark.s3
@pytest.mark.timeout(60 * max(NUM_KILLS, 1))
def test_many_kills(make_run: Make, undisturbed: Undisturbed, seed: int, capsys: pytest.CaptureFixture[str]):
    """Every moment with every victim, on both storages in turn; those not met are tried again in another run."""
    rng = random.Random(seed)
    table: Counter[tuple[str, ...]] = Counter()
    todo = draw_todo(rng)
    for number in itertools.count():
        if sum(table.values()) >= NUM_KILLS:
            break
        storage, precision = STORAGES[number % 2], ("float64", "float64", "float32")[number % 3]
        run = make_run(storage, precision, f"run-{number}")
        met, outcome = kill_and_finish(run, todo[storage], undisturbed(precision), rng)
        for doom in met:
            table[doom.moment, doom.victim, storage, outcome] += 1
        with capsys.disabled():
            print(f"run {number}, {storage}, {precision}: {outcome} after {', '.join(map(str, met))}", flush=True)
        assert outcome == SAME or met, outcome
    with capsys.disabled():
        print_table(table)
    assert {outcome for *_, outcome in table} == {SAME}


def kill_and_finish(
    run: ChaosRun, todo: list[tuple[str, str]], base: Outcome, rng: random.Random
) -> tuple[list[Doom], str]:
    """Kill a run some times and let it finish; return the kills, and what came of it in a few words."""
    met: list[Doom] = []
    try:
        while run.steps_left and len(met) < MOST_KILLS_A_RUN:
            doom = draw_doom(rng, run, *take_possible(todo, run))
            met.append(doom)
            if not kill(run, doom, rng):
                todo.append((doom.moment, doom.victim))
                met.pop()
                break
        finish(run, base, rng)
        return met, SAME
    except Exception as error:  # all that may go wrong belongs into the table
        return met, f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def draw_todo(rng: random.Random) -> dict[str, list[tuple[str, str]]]:
    """Return per storage all moments with all victims, in drawn order, as often as kills were asked for."""
    todo = {}
    for storage in STORAGES:
        pairs = list(itertools.product(MOMENTS, VICTIMS))
        rounds = -(-NUM_KILLS // (len(STORAGES) * len(pairs))) + 1
        todo[storage] = [pair for _ in range(rounds) for pair in rng.sample(pairs, len(pairs))]
    return todo


def take_possible(todo: list[tuple[str, str]], run: ChaosRun) -> tuple[str, str]:
    """Take the next pair that this run can meet now."""
    commits = len(run.commits())
    for pair in todo:
        moment, _ = pair
        if (moment == "restore" and commits == 0) or (moment == "retention" and run.steps_left <= KEEP):
            continue
        todo.remove(pair)
        return pair
    return todo.pop(0)


def draw_doom(rng: random.Random, run: ChaosRun, moment: str, victim: str) -> Doom:
    """Draw the rest of a doom, such that the next driver of the run comes to it."""
    phase, step = rng.choice(PHASES), rng.randint(1, min(2, run.steps_left))
    count, nth = step, rng.randint(1, 2)
    if moment == "generation":
        nth = rng.randint(1, 4)
    elif moment == "weight sync":  # the first one is of the start
        count, nth = step + rng.randint(0, 1), rng.randint(1, 8)
    elif moment == "journal record":  # the first one is the take-over, when there are no workers
        count = step + (rng.randint(0, 1) if victim == "driver" else 1)
    elif moment == "retention":  # the first one is of the start; there is something to remove when enough was kept
        count = rng.randint(KEEP + 1, min(KEEP + 2, run.steps_left))
    elif moment == "restore":
        count = nth = 1
    elif moment == "start":
        # On disk the parts are: temporary heartbeat, take-over, temporary run.yaml, run.yaml, workers, and on a resume
        # the state, temporary metrics and metrics; objects have no temporary files.
        built, last = (3, 5) if run.is_remote else (5, 8)
        last = last if run.commits() else built
        count, nth = 1, rng.randint(1 if victim == "driver" else built, last)
        phase = phase if victim == "driver" else rng.choice(PHASES[1:])
    return Doom(moment, phase, victim, count=count, nth=nth, delay_s=rng.uniform(0, 0.02))


def print_table(kills: Counter[tuple[str, ...]]) -> None:
    table = Table(title=f"{sum(kills.values())} kills", title_justify="left")
    for column in ("moment", "victim", "storage", "kills", "outcome"):
        table.add_column(column, justify="right" if column == "kills" else "left")
    for (moment, victim, storage, outcome), count in sorted(kills.items()):
        table.add_row(moment, victim, storage, str(count), outcome)
    Console(width=120).print(table)
