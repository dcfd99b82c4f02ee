"""Model-stages that change together on nearly full devices, on real workers in random time: none ever waits for memory.

`NEREUS_TRIALS=300` runs as many of each kind (`make coordination`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from nereus.runtime.local import LocalEngine
from nereus.transition.execute import on_threads
from nereus.transition.primitives import Primitive
from tests.runtime.acquiring import Acquiring, Stuck, independent
from tests.runtime.moving_trials import DEVICES, Account, Trial, with_what_stays
from tests.transition.test_coordination import KINDS, trial

TRIALS = int(os.environ.get("NEREUS_TRIALS", "30"))
BASELINE_TRIALS = int(os.environ.get("NEREUS_TRIALS", "10"))
LIMIT_S = 60.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(90 + 3 * TRIALS)]


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("tests.runtime.paced_rank:PacedRank", memory_per_device_bytes=1 << 30) as engine:
        engine.start(DEVICES)
        yield engine


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_graph_all_reach_the_target(engine: LocalEngine, tmp_path: Path, kind: str) -> None:
    for seed in range(TRIALS):
        graph, memory = trial(kind, seed, most_devices=len(DEVICES))
        once = Trial(engine, with_what_stays(graph), memory, tmp_path)
        account = Account(graph)

        def run(primitive: Primitive, once: Trial = once, account: Account = account) -> Any:
            account.start(primitive)
            result = once.transition.run_primitive(primitive.id)
            account.end(primitive)
            return result

        with ThreadPoolExecutor(8) as pool:
            line = once.run(on_threads(pool, run), LIMIT_S)
        assert (line["outcome"], line["verified"]) == ("committed", True), once.records
        assert not account.failures, (kind, seed, account.failures)
        once.check()


@pytest.mark.parametrize("kind", KINDS)
def test_without_resource_edges_many_get_stuck(
    engine: LocalEngine, tmp_path: Path, kind: str, record_property: Any
) -> None:
    """Stuck is a circle: each holds what the next one waits for. The others reach the target as well."""
    stuck = between = 0
    for seed in range(BASELINE_TRIALS):
        graph, memory = trial(kind, seed, most_devices=len(DEVICES))
        alone = independent(graph, memory)
        once = Trial(engine, with_what_stays(alone), memory, tmp_path)
        with ThreadPoolExecutor(len(alone.primitives)) as pool:
            try:
                line = once.run(on_threads(pool, Acquiring(alone, once.transition.run_primitive)), LIMIT_S)
            except Stuck as error:
                stuck += 1
                between += len({primitive.model_stage for primitive in error.circle}) > 1
                continue
        assert line["outcome"] == "committed", once.records
        once.check()
    record_property("stuck", stuck / BASELINE_TRIALS)
    print(f"{kind}: {stuck} of {BASELINE_TRIALS} stuck without resource edges, {between} of them between model-stages")
    assert stuck > 0.1 * BASELINE_TRIALS
