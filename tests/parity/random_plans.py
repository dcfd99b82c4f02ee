"""Plans at random, as a user could write them into a schedule."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any


def random_plan(
    rng: random.Random, stages: Sequence[str], devices: Sequence[int], *, most_tp: int, most_pp: int
) -> dict[str, dict[str, Any]]:
    """Return a plan in which every model-stage has a layout, replicas and devices of its own; overlap at will."""
    return {name: _entry(rng, devices, most_tp, most_pp) for name in stages}


def _entry(rng: random.Random, devices: Sequence[int], most_tp: int, most_pp: int) -> dict[str, Any]:
    degrees = range(1, len(devices) + 1)
    choices = [
        (dp, tp, pp)
        for dp, tp, pp in itertools.product(degrees, repeat=3)
        if dp * tp * pp <= len(devices) and tp <= most_tp and pp <= most_pp
    ]
    dp, tp, pp = rng.choice(choices)
    return {"dp": dp, "tp": tp, "pp": pp, "devices": rng.sample(list(devices), dp * tp * pp)}


def random_schedule(
    seed: int, stages: Sequence[str], steps: Sequence[int], *, most_devices: int = 4, most_tp: int = 4, most_pp: int = 5
) -> list[list[Any]]:
    """Return plans for some steps, on 1 to `most_devices` devices each; tp 3 and pp 3 come up in every schedule."""
    rng = random.Random(seed)
    plans = [
        random_plan(rng, stages, range(rng.randint(1, most_devices)), most_tp=most_tp, most_pp=most_pp) for _ in steps
    ]
    for degree in ("tp", "pp"):
        plan = plans[rng.randrange(len(plans))]
        entry = {"dp": 1, "tp": 1, "pp": 1, "devices": rng.sample(range(most_devices), 3), degree: 3}
        plan[rng.choice(list(stages))] = entry
    return [[step, plan] for step, plan in zip(steps, plans, strict=True)]
