"""A worker that is struck in the midst of a transition: the job goes on, and comes to what the undisturbed one does.

A handful of points for every test run; `NEREUS_CHAOS=60` takes so many, of all kinds that its scenarios come to.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from nereus.runtime import shard_queue
from nereus.runtime.session import Session
from tests.chaos.points import PointDoom
from tests.chaos.scenarios import CHANGE, SCENARIOS
from tests.chaos.struck import Struck, StruckRuns, assert_same, run_undisturbed

NUM_KILLS = int(os.environ.get("NEREUS_CHAOS", "0"))
# What a commit does beside the transition: when it comes to its points isn't settled.
BESIDE = "write_shard"
SILENT_AFTER_S = 5.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StruckRuns]:
    runs = StruckRuns(tmp_path_factory.mktemp("points") / "dooms")
    with runs.engine:
        yield runs


@pytest.fixture(scope="module")
def base(runs: StruckRuns, tmp_path_factory: pytest.TempPathFactory) -> Struck:
    """What nobody disturbs."""
    return run_undisturbed(runs, tmp_path_factory.mktemp("base") / "run")


def kill(point: str, device: int, *then: PointDoom) -> PointDoom:
    return PointDoom(point, device, "kill", then)


def fail(point: str, device: int, *then: PointDoom) -> PointDoom:
    return PointDoom(point, device, "raise", then)


# Of the points below so many are in the default suite.
QUICK = 3
# Where, who, and what the record says: back from a commit on the old plan or the new one, or back on the old plan.
HANDFUL = [
    ("grow", kill("start>begins#1", 1), "rolled_back, committed"),
    ("split", kill("begin_transition>connected#3", 1), "recovered, committed"),
    ("in place", kill("run reshard in place>chunk freed#2", 0), "recovered, committed"),
    ("from a commit", kill("run restore>fed#1", 2), "rolled_back, committed"),
    ("own set", kill("stage>finished#1", 1), "recovered, committed"),
    ("merge", kill("commit_transition>formed#1", 0), "recovered"),
    ("move", kill("hold_shards>begins#1", 2), "recovered"),
    ("move", fail("run move>moved#3", 2, kill("undo destroy>begins#1", 2)), "recovered, committed"),
]


@pytest.mark.skipif(NUM_KILLS > 0, reason="the long form covers it")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "doom", "outcomes"),
    [
        pytest.param(*each, id=f"{each[0]}: {each[1]}", marks=() if number < QUICK else pytest.mark.long)
        for number, each in enumerate(HANDFUL)
    ],
)
def test_a_worker_that_is_struck_leaves_no_trace(
    name: str, doom: PointDoom, outcomes: str, runs: StruckRuns, base: Struck, tmp_path: Path
):
    run = runs.run(tmp_path / "run", SCENARIOS[name], doom)
    assert run.is_met and run.outcomes == outcomes
    assert all(line["reason"] for line in run.lines if line["outcome"] != "committed")
    in_force = [line["in_force"] for line in run.lines if line["outcome"] == "recovered"]
    assert in_force == {"recovered": ["to"], "recovered, committed": ["from"]}.get(outcomes, [])
    assert_same(run, base)


@pytest.mark.skipif(NUM_KILLS > 0, reason="the other tests cover what is long")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["begin_transition", "_staged_set"])
def test_a_worker_that_died_before_the_transition_is_missed(
    method: str, runs: StruckRuns, base: Struck, tmp_path: Path
):
    """One that is started in its place holds nothing, as one would that is started after the commit was waited for."""

    def prepare(session: Session) -> None:
        call = getattr(session, method)

        def kill_and_call(step: int, **kwargs: Any) -> Any:
            if step == CHANGE and session.next_step == CHANGE and not killed:
                killed.append(session.worker_pids()[1])
                os.kill(killed[0], signal.SIGKILL)
                while 1 in session.worker_pids():
                    time.sleep(0.01)
            return call(step, **kwargs)

        setattr(session, method, kill_and_call)

    killed: list[int] = []
    run = runs.run(tmp_path / "run", SCENARIOS["merge"], None, prepare)
    assert killed and run.outcomes == "recovered, committed"
    assert "device 1 was lost before step 2" in run.lines[0]["reason"]
    assert_same(run, base)


class DeafJournal:
    """Takes no record of some outcomes, as a store that is full."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes, self.asked = outcomes, list[str]()

    def cover(self, session: Session) -> None:
        write = session._journal_transition

        def refuse(body: dict[str, Any]) -> None:
            self.asked.append(body["outcome"])
            if body["outcome"] in self.outcomes:
                raise OSError("no space left")
            write(body)

        session._journal_transition = refuse  # type: ignore[method-assign]


@pytest.mark.skipif(NUM_KILLS > 0, reason="the other tests cover what is long")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("deaf_to", "doom", "outcomes", "asked"),
    [
        (["committed"], None, "rolled_back, rolled_back", [*["committed"] * 3, "rolled_back"] * 2),
        (
            ["rolled_back"],
            fail("sum_up>unit summed#2", 1),
            "rolled_back, committed",
            [*["rolled_back"] * 3, "committed"],
        ),
    ],
    ids=["the commit", "the way back"],
)
def test_a_journal_that_takes_no_record_ends_no_job(
    deaf_to: list[str],
    doom: PointDoom | None,
    outcomes: str,
    asked: list[str],
    runs: StruckRuns,
    base: Struck,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(shard_queue, "_RETRY_WAIT_S", 0.0)
    journal = DeafJournal(*deaf_to)
    run = runs.run(tmp_path / "run", SCENARIOS["split"], doom, journal.cover)
    assert (run.outcomes, journal.asked) == (outcomes, asked)
    assert_same(run, base)


# A stopped worker

STOPS = [
    ("split", "begin_transition>connects#3", 0, "recovered, committed"),
    ("from a commit", "run restore>fed#1", 1, "rolled_back, committed"),
    ("move", "free destroy>dissolved#2", 1, "recovered"),
    ("move", "exit>begins#1", 0, "committed"),
]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_stopped_worker_is_found_by_its_heartbeat(base: Struck, tmp_path: Path):
    runs = StruckRuns(tmp_path / "dooms", silent_after_s=SILENT_AFTER_S)
    with runs.engine:
        for number, (name, point, device, outcomes) in enumerate(STOPS):
            run = runs.run(tmp_path / f"run-{number}", SCENARIOS[name], PointDoom(point, device, "stop"))
            assert run.is_met and run.outcomes == outcomes, (name, point, run.outcomes)
            reasons = [line["reason"] for line in run.lines if line["outcome"] != "committed"]
            assert all(f"silent for {SILENT_AFTER_S:g} s" in reason for reason in reasons), reasons
            assert_same(run, base)


# The long form


@pytest.mark.long
@pytest.mark.skipif(NUM_KILLS == 0, reason="long; NEREUS_CHAOS=60 runs it")
@pytest.mark.timeout(3600)
def test_kills_at_all_kinds_of_points(
    runs: StruckRuns, base: Struck, tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
):
    """Each scenario is run once to see which points its workers come to."""
    logging.disable(logging.WARNING)
    found: dict[str, list[tuple[str, PointDoom]]] = defaultdict(list)
    for name, scenario in SCENARIOS.items():
        run = runs.run(tmp_path / "record" / name, scenario, None)
        assert_same(run, base)
        for device, points in run.points.items():
            for point in points:
                found[point.partition("#")[0]].append((name, kill(point, device)))
    table: Counter[tuple[str, str, str]] = Counter()
    for number, (name, doom) in enumerate(choose(found, random.Random(seed))):
        try:
            run = runs.run(tmp_path / f"run-{number}", SCENARIOS[name], doom)
            assert_same(run, base)
            assert run.is_met or doom.point.startswith(BESIDE), f"nobody came to {doom}"
            outcome = f"same result ({run.outcomes})" if run.is_met else "not met"
        except Exception as error:  # all that may go wrong belongs into the table
            outcome = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
        table[doom.point.partition("#")[0], name, outcome] += 1
        with capsys.disabled():
            print(f"{number}: {name}: {doom}: {outcome}", flush=True)
    logging.disable(logging.NOTSET)
    with capsys.disabled():
        print_table(table)
    assert sum(count for (*_, outcome), count in table.items() if outcome.startswith("same")) >= 40
    assert not [outcome for *_, outcome in table if not outcome.startswith(("same", "not met"))]


def choose(found: dict[str, list[tuple[str, PointDoom]]], rng: random.Random) -> list[tuple[str, PointDoom]]:
    """Return one point of each kind, then more until there are enough: in other scenarios where there are."""
    left = {}
    for label in sorted(found):
        names = list(dict.fromkeys(name for name, _ in found[label]))
        left[label] = [(label, name) for name in rng.sample(names, len(names))]
    order = [pairs[turn] for turn in range(len(SCENARIOS)) for pairs in left.values() if turn < len(pairs)]
    wanted = max(NUM_KILLS, len(left))
    return [rng.choice([pair for pair in found[label] if pair[0] == name]) for label, name in order[:wanted]]


def print_table(kills: Counter[tuple[str, str, str]]) -> None:
    table = Table(title=f"{sum(kills.values())} kills in transitions", title_justify="left")
    for column in ("point", "scenario", "outcome"):
        table.add_column(column)
    for (point, name, outcome), _ in sorted(kills.items()):
        table.add_row(point, name, outcome)
    Console(width=150).print(table)
