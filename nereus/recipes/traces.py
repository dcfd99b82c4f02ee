"""Writes the synthetic device traces of the shipped scenarios; they are checked in, so this runs only when they change.

They look like ten hours of spot instances, 16 at most: levels hold for a quarter of an hour or longer, full half of the
time, with dips of all depths. They are made up; the README of the simulator says how to get the public ones.
"""

import json
import random
from pathlib import Path

SCENARIOS = Path(__file__).parent / "scenarios"
GAP_SECONDS, TICKS, MOST = 300, 120, 16


def make_trace(seed: int) -> dict[str, object]:
    """Return a trace in the format of github.com/skypilot-org/spot-traces."""
    draw = random.Random(seed)
    data: list[int] = []
    while len(data) < TICKS:
        level = MOST if draw.random() < 0.5 else draw.randint(0, MOST - 1)
        hold = draw.randint(3, 4) if level < MOST else draw.randint(3, 12)
        data += [level] * hold
    return {"metadata": {"gap_seconds": GAP_SECONDS, "synthetic": True, "seed": seed}, "data": data[:TICKS]}


if __name__ == "__main__":
    for number in (1, 2, 3):
        (SCENARIOS / f"synthetic-{number}.json").write_text(json.dumps(make_trace(number)) + "\n")
