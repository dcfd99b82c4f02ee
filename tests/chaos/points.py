"""The points of a transition at which a worker can be struck: the real worker, which tells each that it comes to.

A point is `command>part` with the number of times that this worker has been there since the doom was written, such as
`run reshard>chunk freed#2`. The first process that comes to the doomed one takes the doom's file away, so it strikes
once. Without the file nothing is counted.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nereus.runtime import rank_transition, unit_tensors, units
from nereus.runtime.communicator import Communicator
from nereus.runtime.shard_feeds import FeedEnd
from nereus.runtime.worker import WorkerContext
from nereus.transition.primitives import Primitive
from storage.shard_record import ShardRecord
from storage.shard_writer import ShardWriter
from storage.state_reader import StateReader
from tests.chaos.doom import wrap
from tests.runtime.open_rank import OpenRank

FOLDER = "NEREUS_TEST_POINTS"
# Commands of a worker that have a part in a transition or in what follows a failed one.
COMMANDS = (
    "probe",
    "begin_transition",
    "drop_primitive",
    "sum_up",
    "commit_transition",
    "end_transition",
    "undo_transition",
    "hold_shards",
    "write_shard",
    "release",
    "build",
    "connect_sync",
    "restore",
    "sync_weights",
)


@dataclass(frozen=True)
class PointDoom:
    """What happens to a worker at a point.

    Attributes:
        point: as told by the worker.
        device: of the worker.
        way: "kill" (SIGKILL), "stop" (SIGSTOP), "raise" (the command fails, the worker lives).
        then: what happens after that, to whom.
    """

    point: str
    device: int
    way: str = "kill"
    then: tuple[PointDoom, ...] = field(default=())

    def __str__(self) -> str:
        then = "".join(f", then {doom}" for doom in self.then)
        return f"{self.way} device {self.device} at {self.point}{then}"


class PointFolder:
    """Where dooms lie and where workers tell how far they are; seen from the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0

    def announce(self) -> None:
        """Let workers that are started from here on look here."""
        os.environ[FOLDER] = str(self.path)

    def write(self, doom: PointDoom | None) -> None:
        """Begin to count points; None: only record them."""
        self._number += 1
        for old in self.path.glob("points-*"):
            old.unlink()
        chain = [] if doom is None else [asdict(part) for part in (doom, *doom.then)]
        _replace(self.path / "doom.json", json.dumps({"number": self._number, "chain": chain}))

    def end(self) -> list[str]:
        """Stop counting; return what is left of the chain of dooms: nothing where all were met."""
        file = self.path / "doom.json"
        left = json.loads(file.read_text())["chain"]
        file.unlink()
        return [doom["point"] for doom in left]

    def points(self) -> dict[int, list[str]]:
        """Return the points that were recorded, by device."""
        return {int(file.name.partition("-")[2]): file.read_text().split("\n")[:-1] for file in self._files()}

    def _files(self) -> Iterator[Path]:
        yield from sorted(self.path.glob("points-*"))

    def slow_down(self, seconds: float) -> None:
        """Have each shard take so long, from the next one on."""
        _replace(self.path / "slow", str(seconds))


def _replace(path: Path, text: str) -> None:
    new = path.with_name(f"new-{path.name}")
    new.write_text(text)
    os.replace(new, path)


class PointRank(OpenRank):
    """Tells each point it comes to, and does there to itself what the doom says."""

    def __init__(self, context: WorkerContext) -> None:
        self.folder = Path(os.environ[FOLDER])
        self._number, self._counts, self._lock = -1, Counter[str](), threading.Lock()
        self._command = threading.local()
        self._device = context.device
        with self._within("start"):
            super().__init__(context)
            mark_parts(self.at)

    def close(self) -> None:
        """Called at the worker's orderly end."""
        with self._within("exit"):
            pass

    def run_primitive(self, primitive: Primitive, restore: Any) -> int:
        how = "undo" if "/undo-" in primitive.id else "free" if primitive.after_commit else "run"
        chunks = " in place" if primitive.in_place else ""
        with self._within(f"{how} {primitive.kind}{chunks}"):
            return super().run_primitive(primitive, restore)

    def write_shard(self, folder: str, file: str) -> Any:
        with self._within("write_shard" if "/step-" in folder else "stage"):
            self._take_long()
            return super().write_shard(folder, file)

    def feed_shard(self, feed: str, item: ShardRecord | FeedEnd) -> None:
        if isinstance(item, ShardRecord):  # so that the end overtakes the last one
            self._take_long()
        super().feed_shard(feed, item)

    def _take_long(self) -> None:
        slow = self.folder / "slow"
        if slow.exists():
            time.sleep(float(slow.read_text()))

    @contextmanager
    def _within(self, command: str) -> Iterator[None]:
        self._command.name = command
        self.at("begins")
        yield
        self.at("ends")
        self._command.name = None

    def at(self, part: str) -> None:
        """Come to a point."""
        command = getattr(self._command, "name", None)
        if command is None:
            return
        try:
            told = json.loads((self.folder / "doom.json").read_text())
        except FileNotFoundError:
            return
        with self._lock:
            if told["number"] != self._number:
                self._number = told["number"]
                self._counts.clear()
            label = f"{command}>{part}"
            self._counts[label] += 1
            point = f"{label}#{self._counts[label]}"
            if not told["chain"]:
                with open(self.folder / f"points-{self._device}", "a") as file:
                    file.write(point + "\n")
                return
            doom, *rest = told["chain"]
            if (doom["point"], doom["device"]) != (point, self._device):
                return
            _replace(self.folder / "doom.json", json.dumps({"number": self._number, "chain": rest or [_OVER]}))
        if doom["way"] == "raise":
            raise RuntimeError(f"doomed at {point}")
        os.kill(os.getpid(), signal.SIGSTOP if doom["way"] == "stop" else signal.SIGKILL)


# What no worker comes to; it tells that all dooms were met.
_OVER = {"point": "", "device": -1}


def _told(name: str) -> Callable[..., Any]:
    def command(self: PointRank, *arguments: Any, **named: Any) -> Any:
        with self._within(name):
            return getattr(OpenRank, name)(self, *arguments, **named)

    return command


for _name in COMMANDS:
    if _name not in PointRank.__dict__:
        setattr(PointRank, _name, _told(_name))


def mark_parts(at: Callable[[str], None]) -> None:
    """Mark the small parts that commands consist of."""

    def after(part: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                result = call(*arguments, **named)
                at(part)
                return result

            return wrapped

        return around

    connect = Communicator.connect

    def connected(*arguments: Any, **named: Any) -> Communicator:
        at("connects")
        result = connect(*arguments, **named)
        at("connected")
        return result

    Communicator.connect = connected  # type: ignore[method-assign]
    wrap(Communicator, "close", after("closed"))
    wrap(unit_tensors.HeldTensors, "make", after("made"))
    wrap(unit_tensors.HeldTensors, "free", after("chunk freed"))
    wrap(unit_tensors.HeldTensors, "find", after("slice"))
    wrap(unit_tensors.HeldTensors, "sums", after("unit summed"))
    wrap(units.Units, "form", after("formed"))
    wrap(units.Units, "dissolve", after("dissolved"))
    wrap(rank_transition.RankTransition, "_move", after("moved"))
    wrap(StateReader, "feed", after("fed"))
    wrap(ShardWriter, "finish_shard", after("finished"))
