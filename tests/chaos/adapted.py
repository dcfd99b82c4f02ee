"""Runs under control to which much happens: the world of each, its drivers one after the other, and its end."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nereus.control import read_controls, tell_drain, tell_scale
from nereus.resume import next_step
from tests.chaos.adapted_job import NO_DEVICES
from tests.chaos.disturbances import KINDS, Disturbance, draw
from tests.chaos.runs import TREE, ChaosRun, uniform

STEPS = 7
DEVICES = 3
# Memory of a device, and how many devices are always there with it: two where one is hardly enough.
MEMORIES = {"2GiB": 1, "64MiB": 2}
MOST_DRIVERS = 8
# Workers are more than cores, and each of them waits for its peers.
LIMIT_S = 400.0
ADAPTED_TREE: dict[str, Any] = {
    **TREE,
    "steps": STEPS,
    "model": {"tiny": {"hidden": 128, "layers": 5, "heads": 8, "kv_heads": 4, "intermediate": 250, "vocab": 29}},
}
FIXED = {"adapt": {"enabled": False}, "plan": uniform(dp=1, tp=1, pp=1), "cluster": {"devices": 1}}


@dataclass(frozen=True)
class World:
    """What a run has from its beginning.

    Attributes:
        trace: devices by step.
        every: steps between two commits.
    """

    memory: str
    trace: list[list[int]]
    transport: str
    every: int

    @property
    def least(self) -> int:
        return MEMORIES[self.memory]

    @property
    def tree(self) -> dict[str, Any]:
        """Return the tree of the run's config."""
        return {
            **ADAPTED_TREE,
            "adapt": {"enabled": True},
            "plan": "auto",
            "cluster": {"devices": DEVICES, "memory_per_device": self.memory},
            "drift": {"devices": self.trace},
            "transport": self.transport,
            "staging": {**TREE["staging"], "every": self.every},
        }


def draw_world(rng: random.Random) -> World:
    memory = rng.choice([*MEMORIES])
    counts = [rng.randint(MEMORIES[memory], DEVICES)]
    changes = sorted(rng.sample(range(1, STEPS), rng.randint(1, 3)))
    for _ in changes:
        counts.append(rng.choice([n for n in range(MEMORIES[memory], DEVICES + 1) if n != counts[-1]]))
    trace = [[step, count] for step, count in zip([0, *changes], counts, strict=True)]
    return World(memory, trace, rng.choice(("auto", "direct", "staged")), rng.choice((1, 1, 2, 3)))


@dataclass
class Story:
    """What has happened to a run.

    Attributes:
        met: disturbances.
        ends: of its drivers, in a word or two.
        unforced: commands that ran out of memory although it had not been used up on purpose.
    """

    world: World
    met: list[dict[str, Any]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    unforced: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        told = [one["text"] for one in self.met]
        return f"{self.world}: {'; '.join(told) or 'nothing'} -> {', '.join(self.ends)}"


class AdaptedRun(ChaosRun):
    """One run under control."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder / "run"), folder / "scratch", "float64")
        self._folder = folder

    def run_fixed(self) -> None:
        """Let the run come to its end on one device, on one plan, with nothing that disturbs it."""
        launch = self.end(
            self._start("tests.chaos.adapted_job", {**ADAPTED_TREE, **FIXED}, {"disturbances": []}), LIMIT_S
        )
        assert launch.returncode == 0, launch.said
        self.check_nothing_left()

    def live_through(self, rng: random.Random, *, num_kills: int) -> Story:
        """Disturb the run until it ends, its driver killed so often; return what has happened."""
        story = Story(draw_world(rng))
        for number in range(MOST_DRIVERS):
            kills = num_kills > sum(one["kind"] == "driver" for one in story.met)
            end = self._launch(story, self._draw(rng, story.world, kills=kills, calm=number > MOST_DRIVERS - 3))
            story.ends.append(end)
            if end == "finished":
                self.check_nothing_left()
                return story
            self.check_commits()
            self._say_between(rng, story.world, end)
        raise AssertionError(f"no driver of {MOST_DRIVERS} came to the end: {story}")

    def _draw(self, rng: random.Random, world: World, *, kills: bool, calm: bool) -> list[Disturbance]:
        steps = range(min(next_step(self.commits()), STEPS - 1), STEPS)
        kinds = [] if calm else rng.choices(KINDS[:-1], (3, 3, 2, 2, 2), k=rng.randint(3, 5))
        if kills and not calm:
            kinds.append("driver")
        return [draw(rng, kind, steps, DEVICES, world.least) for kind in kinds]

    def _launch(self, story: Story, disturbances: Sequence[Disturbance]) -> str:
        """Run one driver to its end; return how it ended."""
        what = {"disturbances": [asdict(one) for one in disturbances]}
        process = self._start("tests.chaos.adapted_job", story.world.tree, what)
        launch = self.end(process, LIMIT_S)
        number = len(story.ends)
        (self._folder / f"driver-{number}.log").write_text(launch.said)
        self.wait_until_alone()
        kinds = set()
        for line in self._read_report(process):
            if "out_of_memory" in line:
                story.unforced += [] if line["forced"] else [line["out_of_memory"]]
            else:
                story.met.append(line)
                kinds.add(line["kind"])
        if launch.returncode == 0:
            return "finished"
        if launch.returncode == -9 and "driver" in kinds:
            return "killed"
        if launch.returncode == NO_DEVICES:
            return "no devices"
        raise AssertionError(f"driver {number} ended with {launch.returncode}: {story}\n{launch.said[-6000:]}")

    @staticmethod
    def _read_report(process: Any) -> list[dict[str, Any]]:
        lines = process.report.read_text().splitlines() if process.report.exists() else []
        return [json.loads(line) for line in lines]

    def _say_between(self, rng: random.Random, world: World, end: str) -> None:
        """Say something while no driver hears it; after an end for want of devices that all are back."""
        if end == "no devices" or rng.random() < 0.3:
            tell_scale(self.run_dir, DEVICES)
        elif rng.random() < 0.3 and len(read_controls(self.run_dir).drains) < DEVICES - world.least:
            with suppress(ValueError):
                tell_drain(self.run_dir, rng.randrange(DEVICES), None)
