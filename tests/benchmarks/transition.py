"""A change of the plan side by side with other ways to move the same bytes: SmolLM2's parameters and Adam moments.

Run `python -m tests.benchmarks.transition [--model DIR] [--repeats N] [--quick] [--json FILE]`. Two workers go from tp2
to pp2 and back, and from dp1 to dp2, each by three ways: direct over shared memory, direct over sockets (as between
hosts), and staged on tmpfs with nothing committed before. A transition is driven as in a run and timed as a whole
(prepare, move, verify, commit, free), and the moves alone. Beside it:

raw: the same bytes by send and receive between prepared buffers, over the same kind of communicator, and over plain
    gloo. Bytes that stay on a device are copied inside it.
dcp: torch.distributed.checkpoint, saved by the old ranks and loaded by the new ones, on tmpfs and on a disk.
price: what the probe of the machine and the cost model say before the move.

All sides take turns in one run, and every element is compared after each side's first turn, outside of what is timed.
Before each turn of a side that needs new memory (ours, dcp) free memory is touched once, so that a virtual machine's
host doesn't have to give it back within the time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from nereus.layout import Layout
from tests.benchmarks.bench_job import pin_to_cores
from tests.benchmarks.report import DEFAULT_MODEL, OUT_DIR, describe_run, print_table, require_model, write_record
from tests.benchmarks.staged_peers import Peers
from tests.benchmarks.transition_sides import Ours, Sample, touch_memory

MEMORY = Path("/dev/shm")
QUICK_MODEL = {"tiny": {"hidden": 384, "layers": 8, "heads": 6, "kv_heads": 3, "intermediate": 768, "vocab": 4096}}
# Of the whole against the quicker of dcp's two places; of the moves' rate against raw; of the price.
GOALS = {"shared memory": 10.0, "sockets": 6.0, "staged": 2.0, "raw": 0.85, "price": 0.2}


class Way(NamedTuple):
    """How a transition moves bytes."""

    name: str
    transport: Literal["direct", "staged"]
    shared_memory: bool


WAYS = (
    Way("shared memory", "direct", True),
    Way("sockets", "direct", False),
    Way("staged", "staged", True),
)
RAW = ("shared memory", "sockets", "gloo")


class Case(NamedTuple):
    """Two layouts of two workers, and between which of them the way is measured; dcp loads into the third."""

    layouts: Mapping[str, Mapping[str, int]]
    moves: tuple[tuple[str, str], ...]
    peer_layouts: Mapping[str, Layout | None]
    peer_target: Mapping[str, str]


CASES = (
    Case(
        {"tp2": {"tp": 2}, "pp2": {"pp": 2}},
        (("tp2", "pp2"), ("pp2", "tp2")),
        {"tp2": Layout(2, 1), "pp2": Layout(1, 2)},
        {"tp2": "tp2", "pp2": "pp2"},
    ),
    # A rank that stays as it is loads nothing.
    Case({"dp1": {}, "dp2": {"dp": 2}}, (("dp1", "dp2"),), {"dp1": Layout(1, 1), "dp2": None}, {"dp2": "dp2"}),
)


def measure(case: Case, model: str | Mapping[str, Any], folder: Path, *, repeats: int) -> list[dict[str, Any]]:
    """Return a record for each move of a case."""
    samples: dict[tuple[str, str], list[dict[str, Sample]]] = {move: [] for move in case.moves}
    moved: dict[tuple[str, str], dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
        Ours(model, case.layouts, memory) as ours,
        Peers("moves", ours.describe(case.peer_layouts, f"{folder}/store"), folder) as peers,
    ):
        for turn in range(repeats + 1):  # the first warms up, and is checked
            of_turn: dict[tuple[str, str], dict[str, Sample]] = {move: {} for move in case.moves}
            for way in WAYS:
                for move, sample in _there_and_back(ours, case, way, moved, check=turn == 0):
                    of_turn[move][way.name] = sample
            for move, of_move in of_turn.items():
                for raw in RAW:
                    of_move[f"raw {raw}"] = {"seconds": ours.exchange(raw, moved[move]["traffic"])}
                for place, root in (("tmpfs", memory), ("disk", os.fspath(folder))):
                    of_move[f"dcp {place}"] = _dcp(peers, move[0], case.peer_target[move[1]], root, check=turn == 0)
                samples[move].append(of_move)
    return [_record(move, moved[move], turns[1:]) for move, turns in samples.items()]


def _there_and_back(
    ours: Ours, case: Case, way: Way, moved: dict[tuple[str, str], dict[str, Any]], *, check: bool
) -> list[tuple[tuple[str, str], Sample]]:
    """Go to the other layout and back to that of the start; return what counts of it."""
    first, other = case.layouts
    measured = []
    for move in ((first, other), (other, first)):
        transport = way.transport if move in case.moves else "direct"
        sample, graph = ours.move(move[1], transport, shared_memory=way.shared_memory)
        if check:
            ours.check()
        if move in case.moves:
            measured.append((move, sample))
            if way.transport == "direct":
                traffic = ours.traffic(graph)
                total, between = sum(traffic.values()), sum(n for (s, t), n in traffic.items() if s != t)
                moved[move] = {"traffic": traffic, "total": total, "between": between}
    return measured


def _dcp(peers: Peers, source: str, target: str, root: str, *, check: bool) -> Sample:
    folder = f"{root}/dcp"
    if check:
        peers.order("spoil", layout=target)
    touch_memory()
    save_s, _ = peers.order("save", layout=source, folder=folder)
    load_s, _ = peers.order("load", layout=target, folder=folder)
    shutil.rmtree(folder)
    if check:
        peers.order("check", layout=target)
    return {"seconds": save_s + load_s, "save_s": save_s, "load_s": load_s}


def _record(move: tuple[str, str], moved: Mapping[str, Any], turns: Sequence[Mapping[str, Sample]]) -> dict[str, Any]:
    sides = {
        side: {key: statistics.median(turn[side][key] for turn in turns) for key in turns[0][side]} for side in turns[0]
    }
    dcp_s = min(sides["dcp tmpfs"]["seconds"], sides["dcp disk"]["seconds"])
    ways = {}
    for way in WAYS:
        own = sides[way.name]
        raw = sides.get(f"raw {way.name}")
        ways[way.name] = {
            **own,
            "times_dcp": dcp_s / own["seconds"],
            "rate_to_raw": raw["seconds"] / own["move_s"] if raw else None,
            "price_error": own["price_s"] / own["seconds"] - 1,
            "price_move_error": own["price_move_s"] / own["move_s"] - 1,
        }
    return {
        "move": " -> ".join(move),
        "bytes": moved["total"],
        "bytes_between": moved["between"],
        "sides": sides,
        "ways": ways,
        "turns": list(turns),
    }


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the table of our ways, and that of the other sides."""
    lines = []
    for row in rows:
        for name, way in row["ways"].items():
            rate, goal = way["rate_to_raw"], GOALS[name]
            lines.append(
                [
                    row["move"],
                    name,
                    way["seconds"],
                    way["move_s"],
                    rate,
                    GOALS["raw"] if rate else None,
                    way["times_dcp"],
                    f">= {goal:g}",
                    way["price_s"],
                    f"{way['price_error']:+.0%}",
                    f"{way['price_move_error']:+.0%}",
                ]
            )
    columns = ["move", "way", "whole", "moves", "raw/moves", "goal", "dcp/whole", "goal", "price", "off", "moves off"]
    print_table("ours, in seconds", columns, lines, num_names=2)
    columns = ["move", "GB", "between", *(f"raw {way}" for way in RAW), "dcp tmpfs", "dcp disk"]
    lines = [
        [
            row["move"],
            row["bytes"] / 1e9,
            row["bytes_between"] / 1e9,
            *(row["sides"][f"raw {way}"]["seconds"] for way in RAW),
            *(row["sides"][f"dcp {place}"]["seconds"] for place in ("tmpfs", "disk")),
        ]
        for row in rows
    ]
    print_table("other sides, in seconds", columns, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="SmolLM2 as a Hugging Face directory")
    parser.add_argument("--folder", default=str(OUT_DIR), help="where the disk is that dcp uses")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model, one turn")
    parser.add_argument("--json", default=str(OUT_DIR / "transition.json"), help="file to write the record to")
    options = parser.parse_args(arguments)
    require_model(options.model)
    Path(options.folder).mkdir(parents=True, exist_ok=True)
    pin_to_cores(2)
    head = describe_run("transition", threads=2)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        print(f"  {', '.join(' -> '.join(move) for move in case.moves)} ...", flush=True)
        with tempfile.TemporaryDirectory(dir=Path(options.folder).resolve()) as folder:
            model = QUICK_MODEL if options.quick else options.model
            rows += measure(case, model, Path(folder), repeats=1 if options.quick else options.repeats)
        write_record({**head, "model": options.model, "goals": GOALS, "rows": rows}, options.json)
    print_rows(rows)


if __name__ == "__main__":
    main()
