"""What a move in place takes in real workers stays within the bytes that the graph has reserved for it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nereus.model.spec import ModelSpec
from nereus.plan import MODEL_STAGES, Plan
from nereus.runtime.engine import run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.transition import Submit
from nereus.transition.graph import plan_transition
from nereus.transition.memory import TransitionMemory, resident_bytes
from nereus.transition.primitives import Primitive
from tests.runtime.moving_trials import Trial, with_what_stays
from tests.runtime.watched_rank import Peak
from tests.transition.cases import WORKLOAD, stage

# 40 million parameters in 16 layers: 480 MB with their moments, far more than buffers and chunks take.
ACTOR = ModelSpec("llama", 64, 512, 16, 8, 8, 64, 1024)
TINY = ModelSpec("llama", 64, 16, 2, 2, 2, 8, 16, head="value")
SPECS = {name: replace(TINY, head="lm") for name in MODEL_STAGES} | {
    "actor.generation": ACTOR,
    "actor.training": ACTOR,
    "critic.training": TINY,
    "reward.inference": replace(TINY, head="score"),
}
TRAINING = "actor.training"
ROOM = 160 << 20
# Tensors and messages stay within the reservation but for this much: what came between two looks.
SLACK = 4 << 20
# Resident pages may be this much more: the heap has holes where small old tensors were and large new ones don't fit.
# They grow with what is converted, and are given back at its end; a third of what a rank here holds.
HOLES = 80 << 20

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's resettable peak RSS")


def take_excess(service: str, folder: Path) -> dict[int, Peak]:
    """Convert tp 2 to pp 2 in place on two workers; return by device the bytes beyond what was reserved."""
    current, target = (Plan.of({TRAINING: stage(1, tp, pp)}) for tp, pp in ((2, 1), (1, 2)))
    memory = TransitionMemory(SPECS, WORKLOAD, "float32", {})
    held = [resident_bytes(plan, memory, (0, 1)) for plan in (current, target)]
    memory = replace(memory, usable_bytes={device: max(held[0][device], held[1][device]) + ROOM for device in (0, 1)})
    graph = plan_transition(current, target, memory, transport="direct")
    (reshard,) = graph.primitives
    assert reshard.in_place and all(0 < peak <= ROOM for peak, _ in reshard.memory.values())
    with LocalEngine(f"tests.runtime.watched_rank:{service}", memory_per_device_bytes=4 << 30) as engine:
        engine.start((0, 1))
        trial = Trial(engine, with_what_stays(graph), memory, folder)
        line = trial.run(on_one_thread(trial), limit_s=100)
        assert (line["outcome"], line["verified"]) == ("committed", True), trial.records
        peaks = run_command(engine, "take_peaks", {0: {}, 1: {}}, label="peaks", step=None)
    return {
        device: Peak(*(num_bytes - reshard.memory[device].peak for num_bytes in peaks[device][reshard.id]))
        for device in (0, 1)
    }


def on_one_thread(trial: Trial) -> Submit:
    def submit(primitive: Primitive, wait_for: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(trial.transition.run_primitive(primitive.id))
        return done

    return submit


def test_a_move_in_place_stays_within_its_reservation(tmp_path: Path) -> None:
    excess = take_excess("WatchedRank", tmp_path)
    assert all(peak.live <= SLACK for peak in excess.values()), excess
    assert all(peak.resident <= HOLES for peak in excess.values()), excess


def test_it_would_not_if_old_tensors_were_freed_at_the_end(tmp_path: Path) -> None:
    excess = take_excess("HoardingRank", tmp_path)
    assert all(peak.live > 2 * HOLES and peak.resident > 1.5 * HOLES for peak in excess.values()), excess
