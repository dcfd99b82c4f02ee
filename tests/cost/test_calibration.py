"""Efficiencies learned from noisy times: from a prior wrong by two to predictions of unseen plans."""

import json

import numpy as np
import pytest

from nereus.catalog import cluster_preset
from nereus.cost.calibration import Calibration
from nereus.cost.efficiency import CLASSES, CONSERVATIVE, CONSERVATIVE_CPU, Efficiencies, first_guess
from nereus.cost.memory_factor import MemoryFactor
from nereus.cost.operations import Operations
from nereus.cost.step import estimate_step, step_operations
from nereus.plan import Plan
from tests.cost.jobs import ppo_job, random_plan

CLUSTER = cluster_preset("a100-64gb-hdr", 32)


def hidden_truth(rng: np.random.Generator) -> Efficiencies:
    """Return efficiencies, latencies and an overhead that are each wrong by two in the conservative guess."""

    def off(numbers: dict[str, float]) -> dict[str, float]:
        return {name: number * 2.0 ** rng.choice([-1, 1]) for name, number in numbers.items()}

    shares = {name: min(1.0, share) for name, share in off(dict(CONSERVATIVE.efficiency)).items()}
    return Efficiencies(shares, off(dict(CONSERVATIVE.latency_s)), CONSERVATIVE.host_s * 2.0 ** rng.choice([-1, 1]))


def by_class(operations: Operations) -> list[Operations]:
    """Return the parts of some operations that a profiler times one by one."""
    names = [name for name in CLASSES if name in operations.count or name in operations.work_s]
    parts = [
        Operations(
            {name: operations.count[name]} if name in operations.count else {},
            {name: operations.work_s[name]} if name in operations.work_s else {},
        )
        for name in names
    ]
    return [*parts, Operations(host=operations.host)]


def run_step(
    calibration: Calibration, step: int, plan: Plan, truth: Efficiencies, rng: np.random.Generator, *, classes: bool
) -> None:
    """Let the calibration see one step: 2% noise, and 5% of the times three times too long."""
    for operations in step_operations(plan, ppo_job(rng.uniform(500, 8000)), CLUSTER).values():
        for part in by_class(operations) if classes else [operations]:
            seconds = float(part.total_s(truth)) * np.exp(rng.normal(0, 0.02)) * (3 if rng.random() < 0.05 else 1)
            calibration.observe(step, part, seconds)


def errors_on_unseen_plans(efficiencies: Efficiencies, truth: Efficiencies, rng: np.random.Generator) -> np.ndarray:
    errors = []
    for _ in range(30):
        plan, job = random_plan(rng, 32), ppo_job(rng.uniform(500, 8000))
        seconds = [estimate_step(plan, job, CLUSTER, e).total_s for e in (efficiencies, truth)]
        errors.append(abs(seconds[0] / seconds[1] - 1))
    return np.array(errors)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("classes", "num_plans"), [(False, 10), (True, 3)], ids=["whole stages", "by class"])
def test_ten_steps_suffice_to_predict_unseen_plans(seed: int, classes: bool, num_plans: int):
    rng = np.random.default_rng(seed)
    truth, calibration = hidden_truth(rng), Calibration()
    plans = [random_plan(rng, 32) for _ in range(num_plans)]
    before = errors_on_unseen_plans(calibration.efficiencies(), truth, np.random.default_rng(99))
    for step in range(10):
        run_step(calibration, step, plans[step * num_plans // 10], truth, rng, classes=classes)
    after = errors_on_unseen_plans(calibration.efficiencies(), truth, np.random.default_rng(99))
    assert before.mean() > 0.15
    assert after.mean() < 0.05 and after.max() < 0.15, (after.mean(), after.max())


def test_before_the_first_measurement_it_is_the_guess():
    calibration = Calibration()
    assert calibration.efficiencies().efficiency == pytest.approx(dict(CONSERVATIVE.efficiency))
    assert calibration.efficiencies().host_s == pytest.approx(CONSERVATIVE.host_s)
    assert all(share == pytest.approx(1.0) for share in calibration.uncertainty().values())


def test_what_says_nothing_is_ignored():
    calibration = Calibration()
    calibration.observe(0, Operations(), 1.0)
    calibration.observe(0, Operations(work_s={"gemm": np.float64(1)}), 0.0)
    assert calibration.efficiencies().efficiency["gemm"] == pytest.approx(CONSERVATIVE.efficiency["gemm"])


def test_a_measured_message_is_what_collectives_are_guessed_by():
    assert first_guess(accelerator=False) is CONSERVATIVE_CPU and first_guess(accelerator=True) is CONSERVATIVE
    measured = first_guess(accelerator=False, message_s=3e-5)
    assert measured.latency_s["all_reduce"] == measured.latency_s["all_gather"] == 3e-5
    others = [name for name in CLASSES if name not in ("all_reduce", "all_gather")]
    assert all(measured.latency_s[name] == CONSERVATIVE_CPU.latency_s[name] for name in others)
    assert measured.efficiency == CONSERVATIVE_CPU.efficiency


def test_uncertainty_shrinks_for_what_is_seen_and_stays_for_the_rest():
    calibration, work = Calibration(), Operations(work_s={"gemm": np.float64(1.0)})
    spreads = []
    for step in range(4):
        calibration.observe(step, work, 1 / 0.6)
        spreads.append(calibration.uncertainty()["gemm"])
    assert spreads == sorted(spreads, reverse=True) and spreads[0] < 0.05
    assert calibration.uncertainty()["decode"] == pytest.approx(1.0)
    assert calibration.efficiencies().efficiency["gemm"] == pytest.approx(0.6, rel=0.01)


def test_it_follows_hardware_that_changes():
    calibration, work = Calibration(), Operations(work_s={"all_reduce": np.float64(1.0)})
    for step in range(60):
        for _ in range(3):
            calibration.observe(step, work, 1 / (0.6 if step < 50 else 0.2))
        seen = calibration.efficiencies().efficiency["all_reduce"]
        if step == 49:
            assert seen == pytest.approx(0.6, rel=0.01)
    assert seen == pytest.approx(0.2, rel=0.05)


def test_what_is_not_seen_any_more_is_not_forgotten():
    calibration = Calibration()
    for step in range(80):
        name = "all_reduce" if step < 10 else "gemm"
        calibration.observe(step, Operations(work_s={name: np.float64(1.0)}), 1 / 0.7)
        learned = calibration.efficiencies().efficiency["all_reduce"]
    assert learned == pytest.approx(0.7, rel=0.02)


def test_a_slow_device_gets_a_factor_and_no_class_is_blamed():
    calibration, work = Calibration(), Operations(work_s={"gemm": np.float64(1.0)})
    for step in range(5):
        calibration.devices.observe({0: 1.0, 1: 1.01, 2: 0.99, 3: 1.6})
        calibration.observe(step, work, 1.6 / 0.5, devices=(2, 3))
    found = calibration.efficiencies()
    assert found.device_factor == pytest.approx({3: 1.6}, rel=0.01)
    assert found.efficiency["gemm"] == pytest.approx(0.5, rel=0.01)
    calibration.devices.forget(3)
    assert calibration.efficiencies().device_factor == {}


def test_one_disturbed_measurement_makes_no_slow_device():
    calibration = Calibration()
    for step in range(5):
        calibration.devices.observe({0: 1.0, 1: 1.0, 2: 3.0 if step == 2 else 1.0})
    calibration.devices.observe({0: 1.0, 1: 9.0})  # two devices have no majority
    assert calibration.devices.factors() == {}


def test_memory_errs_on_the_safe_side_and_narrows():
    memory, rng, factors = MemoryFactor(), np.random.default_rng(0), []
    for _ in range(20):
        factors.append(memory.factor())
        memory.observe(100.0, 100.0 * 0.95 * np.exp(rng.normal(0, 0.01)))
    assert 1.1 < factors[0] < 1.15
    assert factors[0] > factors[1] > factors[-1]
    assert 0.96 < factors[-1] < 1.01
    memory.observe(100.0, 104.0)
    assert memory.factor() >= 1.04
    memory.observe(0.0, 5.0)
    assert memory.ratio() < memory.factor() and MemoryFactor().ratio() == 1.0
    assert MemoryFactor.from_record(json.loads(json.dumps(memory.to_record()))).factor() == memory.factor()


def test_it_comes_back_from_json_as_it_was():
    rng = np.random.default_rng(1)
    truth, calibration = hidden_truth(rng), Calibration()
    for step in range(3):
        run_step(calibration, step, random_plan(rng, 32), truth, rng, classes=False)
        calibration.devices.observe({0: 1.0, 1: 1.0, 2: 1.5})
        calibration.memory.observe(10.0, 11.0)
    again = Calibration.from_record(json.loads(json.dumps(calibration.to_record())))
    assert again.efficiencies().to_record() == calibration.efficiencies().to_record()
    plan = random_plan(rng, 32)
    for one in (calibration, again):
        run_step(one, 3, plan, truth, np.random.default_rng(5), classes=False)
    assert again.efficiencies().to_record() == calibration.efficiencies().to_record()


def test_what_a_step_takes_beside_its_tasks_is_learned_and_kept():
    calibration = Calibration()
    assert calibration.efficiencies().step_s == 0.0
    for seconds in (0.03, 0.02, 5.0, 0.03, -1e-9):
        calibration.observe_rest(seconds)
    again = Calibration.from_record(json.loads(json.dumps(calibration.to_record())))
    for one in (calibration, again):
        assert one.efficiencies().step_s == 0.03
    job, plan = ppo_job(1000), random_plan(np.random.default_rng(0), 8)
    with_rest, without = (
        estimate_step(plan, job, CLUSTER, e) for e in (again.efficiencies(), Calibration().efficiencies())
    )
    assert with_rest.total_s == pytest.approx(without.total_s + 0.03) and with_rest.stages_s == without.stages_s
