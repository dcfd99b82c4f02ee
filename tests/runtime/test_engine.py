"""The local engine with real processes: commands, failures, losses, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from nereus.limits import MOST_SHARDS_IN_FLIGHT
from nereus.runtime import local
from nereus.runtime.deaths import Deaths
from nereus.runtime.engine import CommandError, CommandFailed, Engine, WorkerLost, run_command
from nereus.runtime.local import LocalEngine
from nereus.runtime.messages import decode, encode

PLAIN = f"{__package__ or 'tests.runtime'}.services:PlainService"
GROUP = f"{__package__ or 'tests.runtime'}.services:GroupService"
MIB = 1 << 20


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    with LocalEngine(PLAIN, log_dir=tmp_path_factory.mktemp("log")) as engine:
        engine.start([0, 1])
        yield engine


@pytest.fixture
def group_engine() -> Iterator[LocalEngine]:
    with LocalEngine(GROUP, heartbeat_s=0.2, silent_after_s=2.0) as engine:
        engine.start([0, 1])
        connection = {"devices": [0, 1], "epoch": 1, "same_host": True}
        run_command(engine, "connect", {0: connection, 1: connection}, label="connect", step=None)
        yield engine


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie waits for a parent that isn't ours


def test_messages_carry_views_by_value_and_any_dtype() -> None:
    view = torch.arange(1000.0)[10:20].view(2, 5).t()
    message = {"view": view, "half": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 4), "none": None}
    data = encode(message)
    assert len(data) < 600
    copy = decode(data)
    assert torch.equal(copy["view"], view) and copy["half"].dtype == torch.bfloat16 and copy["empty"].shape == (0, 4)
    copy["view"].add_(1)


def test_a_pipeline_stage_imports_nothing_in_a_worker() -> None:
    """A gradient that comes from the next stage has torch import what it needs; memory and time of every worker."""
    script = (
        "import importlib, sys, torch\n"
        "from nereus.runtime.rank import Rank\n"
        "[importlib.import_module(name) for name in Rank.PRELOADED]\n"
        "known = set(sys.modules)\n"
        "torch.ones(2, requires_grad=True).exp().backward(torch.ones(2))\n"
        "print(len(set(sys.modules) - known))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert int(ran.stdout) == 0


def test_workers_run_commands_with_their_threads_and_cores(engine: LocalEngine) -> None:
    results = run_command(engine, "describe", {0: {}, 1: {}}, label="test", step=None)
    assert [results[device]["device"] for device in (0, 1)] == [0, 1]
    assert all(result["threads"] == 1 and result["huge_pages"] == "1" for result in results.values())
    assert all(result["preloaded"] for result in results.values())
    if len(os.sched_getaffinity(0)) >= 2:
        assert results[0]["cores"].isdisjoint(results[1]["cores"])
    assert results[0]["torch_device"] == "cpu" and set(engine.pids()) == {0, 1}


def test_large_values_go_and_come_back(engine: LocalEngine) -> None:
    value = torch.randn(1 << 20)
    results = run_command(engine, "echo", {0: {"value": value}, 1: {"value": [1, "two"]}}, label="test", step=0)
    assert torch.equal(results[0], value) and results[1] == [1, "two"]


def test_a_failed_future_tells_type_text_and_traceback(engine: LocalEngine) -> None:
    error = engine.submit(0, "fail", message="no such thing").exception(timeout=10)
    assert isinstance(error, CommandFailed) and (error.device, error.error_type) == (0, "ValueError")
    assert error.message == "no such thing" and not error.out_of_memory
    assert "in fail" in error.traceback and "the cause" in error.traceback
    unpicklable = engine.submit(0, "unpicklable").exception(timeout=10)
    assert isinstance(unpicklable, CommandFailed)
    assert engine.submit(0, "echo", value=3).result(timeout=10) == 3


def test_commands_beside_run_during_others_on_any_core_and_after_a_failure() -> None:
    with LocalEngine(PLAIN) as engine:
        engine.start([0])
        nap = engine.submit(0, "nap", seconds=1.0)
        for _ in range(2):
            assert engine.submit_beside(0, "describe").result(timeout=10)["cores"] == os.sched_getaffinity(0)
        failed = engine.submit_beside(0, "fail", message="no room").exception(timeout=10)
        assert isinstance(failed, CommandFailed) and failed.message == "no room"
        assert not nap.done()
        engine.mark_broken("a step failed")
        assert engine.submit_beside(0, "echo", value=1).result(timeout=10) == 1
        engine.submit_beside(0, "end", code=3)
        assert isinstance(engine.submit_beside(0, "nap", seconds=60).exception(timeout=10), WorkerLost)


def test_a_command_beside_does_not_wait_for_all_shards_that_may_be_under_way() -> None:
    with LocalEngine(PLAIN) as engine:
        engine.start([0])
        writes = [engine.submit_beside(0, "nap", seconds=60) for _ in range(MOST_SHARDS_IN_FLIGHT)]
        assert engine.submit_beside(0, "echo", value=1).result(timeout=20) == 1
        assert not any(write.done() for write in writes)


def test_overlapping_commands_of_many_threads_neither_mix_nor_deadlock(engine: LocalEngine) -> None:
    results: list[dict[int, int]] = []

    def work(devices: list[int]) -> None:
        for _ in range(20):
            results.append(run_command(engine, "nap", {d: {"seconds": 0.001} for d in devices}, label="nap", step=1))

    threads = [threading.Thread(target=work, args=(devices,)) for devices in ([0, 1], [1, 0], [0], [1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(results) == 80 and all(device == value for result in results for device, value in result.items())


def test_peak_memory_counts_tensors_and_shared_memory(engine: LocalEngine) -> None:
    engine.submit(1, "measure", num_bytes=MIB).result(timeout=10)
    before, during, after = engine.submit(1, "measure", num_bytes=64 * MIB).result(timeout=10)
    assert 127 * MIB <= during - before < 140 * MIB
    assert after < before + 16 * MIB


def test_release_and_start_leave_the_other_workers_alone(engine: LocalEngine) -> None:
    before = engine.pids()
    engine.release([1])
    assert set(engine.pids()) == {0} and not is_running(before[1])
    engine.start([1, 2])
    after = engine.pids()
    assert set(after) == {0, 1, 2} and after[0] == before[0]
    results = run_command(engine, "describe", {0: {}, 1: {}, 2: {}}, label="test", step=None)
    if len(os.sched_getaffinity(0)) < 3:  # too few cores: nobody is pinned
        assert all(result["cores"] == os.sched_getaffinity(0) for result in results.values())
    engine.release([2])


def test_a_cap_makes_the_allocator_fail() -> None:
    with LocalEngine(PLAIN, memory_per_device_bytes=256 * MIB) as engine:
        engine.start([0])
        assert engine.submit(0, "allocate", num_bytes=64 * MIB).result(timeout=10) >= 64 * MIB
        with pytest.raises(CommandError, match=r"device 0 ran out of memory during critic\.training, step 4") as caught:
            run_command(engine, "allocate", {0: {"num_bytes": 512 * MIB}}, label="critic.training", step=4)
        assert caught.value.out_of_memory


def test_a_worker_in_which_a_thread_cannot_begin_is_lost_and_hangs_nobody() -> None:
    with LocalEngine(PLAIN, heartbeat_s=0.1) as engine:
        engine.start([0])
        with pytest.raises(CommandError, match="device 0 was lost"):
            kwargs: dict[int, dict[str, Any]] = {0: {}}
            run_command(engine, "start_a_thread_without_memory", kwargs, label="threads", step=None, timeout_s=30.0)


def test_a_service_that_cannot_be_made_is_named() -> None:
    failing = PLAIN.replace("Plain", "Failing")
    reason = "device 0 failed during start: ValueError: no service on device 0"
    with LocalEngine(failing) as engine, pytest.raises(CommandError, match=reason):
        engine.start([0])
    missing = PLAIN.replace("PlainService", "MissingService")
    with LocalEngine(missing) as engine, pytest.raises(CommandError, match="can't be imported: AttributeError"):
        engine.start([0])


def test_workers_write_to_a_log_of_the_device(engine: LocalEngine) -> None:
    engine.submit(1, "write", text="a word").result(timeout=10)
    log_dir = engine._settings.log_dir
    assert log_dir is not None and Path(log_dir, "device-1.log").read_text().splitlines() == ["a word", "a word"]


@pytest.mark.parametrize(
    ("number", "reason"),
    [(signal.SIGKILL, r"exited with signal 9 \(SIGKILL\)"), (signal.SIGSTOP, "silent for 2 s")],
)
def test_a_killed_or_stopped_worker_is_the_named_cause(
    group_engine: LocalEngine, number: signal.Signals, reason: str
) -> None:
    pids = group_engine.pids()
    threading.Timer(0.5, os.kill, (pids[1], number)).start()
    started = time.monotonic()
    arguments = {device: {"seconds": 60} for device in (0, 1)}
    with pytest.raises(CommandError, match=rf"device 1 was lost \({reason}\) during actor\.training, step 3") as caught:
        run_command(group_engine, "all_reduce_until_stopped", arguments, label="actor.training", step=3)
    assert time.monotonic() - started < 10
    assert caught.value.device == 1 and isinstance(caught.value.__cause__, WorkerLost)
    with pytest.raises(CommandError, match="device 1 was lost"):
        run_command(group_engine, "barrier", {0: {}}, label="next", step=3)
    group_engine.close()
    assert not any(is_running(pid) for pid in pids.values())


def connect(engine: LocalEngine, epoch: int) -> None:
    connection = {"devices": [0, 1], "epoch": epoch, "same_host": True}
    run_command(engine, "connect", {0: connection, 1: connection}, label="connect", step=None)


def break_it(engine: LocalEngine, *signals: tuple[int, signal.Signals], step: int = 3) -> CommandError:
    """Signal workers while all of them wait for each other in a communicator."""
    pids = engine.pids()
    for device, number in signals:
        threading.Timer(0.2, os.kill, (pids[device], number)).start()
    arguments = {device: {"seconds": 60} for device in (0, 1)}
    with pytest.raises(CommandError) as caught:
        run_command(engine, "all_reduce_until_stopped", arguments, label="actor.training", step=step)
    return caught.value


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Restarts wait for nothing; returns what they would have waited."""
    waits: list[float] = []
    take_wait_s = Deaths.take_wait_s

    def take(deaths: Deaths, device: int) -> float:
        waits.append(take_wait_s(deaths, device))
        return 0.0

    monkeypatch.setattr(Deaths, "take_wait_s", take)
    return waits


def assert_recovered(engine: LocalEngine, epoch: int) -> None:
    """Old and new workers talk with each other."""
    assert engine.broken is None
    connect(engine, epoch)
    arguments = {device: {"tensor": torch.ones(3), "op": "sum"} for device in (0, 1)}
    results = run_command(engine, "all_reduce", arguments, label="test", step=None)
    assert all(torch.equal(result, torch.full((3,), 2.0)) for result in results.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_restarted_and_the_others_keep_their_state(
    group_engine: LocalEngine, at_once: list[float], number: signal.Signals
) -> None:
    before = group_engine.pids()
    run_command(group_engine, "keep", {0: {"value": 7}, 1: {"value": 8}}, label="keep", step=None)
    error = break_it(group_engine, (1, number))
    assert error.device == 1
    assert group_engine.recover(step=3) == (1,)
    after = group_engine.pids()
    assert after[0] == before[0] and after[1] != before[1] and not is_running(before[1])
    assert run_command(group_engine, "kept", {0: {}, 1: {}}, label="kept", step=None) == {0: 7, 1: None}
    assert_recovered(group_engine, 2)
    assert at_once == [1.0]


def test_both_workers_may_be_lost_at_once(group_engine: LocalEngine, at_once: list[float]) -> None:
    break_it(group_engine, (0, signal.SIGKILL), (1, signal.SIGKILL))
    assert group_engine.recover(step=3) == (0, 1)
    assert_recovered(group_engine, 2)


def test_a_failure_without_a_loss_restarts_nobody(group_engine: LocalEngine, at_once: list[float]) -> None:
    before = group_engine.pids()
    with pytest.raises(CommandError, match=r"did not finish within 0\.3 s"):
        run_command(group_engine, "block", {0: {"way": "recv"}}, label="x", step=1, timeout_s=0.3)
    assert group_engine.recover(step=1) == () and group_engine.pids() == before and not at_once
    assert_recovered(group_engine, 2)
    assert group_engine.recover() == ()  # nothing to recover from
    assert_recovered(group_engine, 3)


def test_a_worker_that_does_not_end_its_command_is_killed_and_one_beside_goes_on(
    group_engine: LocalEngine, at_once: list[float]
) -> None:
    beside = group_engine.submit_beside(0, "nap", seconds=2.0)
    stuck = group_engine.submit(1, "nap", seconds=600)
    group_engine.mark_broken("a step failed")
    assert group_engine.recover(0.5, step=0) == (1,)
    assert not beside.done() and beside.result(timeout=10) == 0
    reason = r"its command did not end within 0\.5 s after it was aborted"
    with pytest.raises(WorkerLost, match=reason):
        stuck.result(timeout=0)
    assert_recovered(group_engine, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_that_is_lost_during_the_recovery_is_restarted_too(
    group_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    break_it(group_engine, (1, signal.SIGKILL))
    pending = [group_engine.pids()[0]]

    def take_wait_s(deaths: Deaths, device: int) -> float:
        if pending:
            os.kill(pending.pop(), number)
        return 0.1

    monkeypatch.setattr(Deaths, "take_wait_s", take_wait_s)
    assert group_engine.recover(1.0, step=3) == (0, 1)
    assert_recovered(group_engine, 2)


def test_three_deaths_within_ten_steps_are_too_many(group_engine: LocalEngine, at_once: list[float]) -> None:
    for epoch, step in ((2, 0), (3, 1)):
        break_it(group_engine, (1, signal.SIGKILL), step=step)
        assert group_engine.recover(step=step) == (1,)
        assert_recovered(group_engine, epoch)
    break_it(group_engine, (1, signal.SIGKILL), step=9)
    for _ in range(2):
        with pytest.raises(CommandError, match=r"device 1 was lost \(exited .* third time within ten steps") as caught:
            group_engine.recover(step=9)
        assert caught.value.device == 1 and group_engine.broken is not None
    assert at_once == [1.0, 2.0]
    group_engine.release([1])  # without it the others go on
    assert group_engine.recover(step=9) == ()
    assert run_command(group_engine, "kept", {0: {}}, label="kept", step=9) == {0: None}


def test_a_device_that_never_starts_again_ends_the_recovery(
    group_engine: LocalEngine, at_once: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(group_engine, (1, signal.SIGKILL))
    fork = group_engine._fork

    def fork_in_vain(devices: Sequence[int]) -> Any:
        workers = fork(devices)
        for worker in workers:
            assert wait_for(lambda: worker.pid != 0)  # noqa: B023
            os.kill(worker.pid, signal.SIGKILL)
        return workers

    monkeypatch.setattr(group_engine, "_fork", fork_in_vain)
    with pytest.raises(CommandError, match=r"device 1 was lost .* again and again"):
        group_engine.recover()  # no step: no quarantine
    assert group_engine.broken is not None
    monkeypatch.undo()
    monkeypatch.setattr(Deaths, "take_wait_s", lambda *_: 0.0)
    assert group_engine.recover() == (1,)
    assert_recovered(group_engine, 2)


def test_the_end_of_the_nursery_is_recovered_from(group_engine: LocalEngine, at_once: list[float]) -> None:
    assert group_engine._nursery is not None
    pids = group_engine.pids()
    threading.Timer(0.2, os.kill, (group_engine._nursery.pid, signal.SIGKILL)).start()
    arguments = {device: {"seconds": 60} for device in (0, 1)}
    with pytest.raises(CommandError, match="the process that forks workers ended"):
        run_command(group_engine, "all_reduce_until_stopped", arguments, label="x", step=0)
    assert group_engine.recover(step=0) == (0, 1)
    assert_recovered(group_engine, 2)
    assert wait_for(lambda: not any(is_running(pid) for pid in pids.values()))


def test_a_device_whose_restart_was_not_tried_has_died_once(
    group_engine: LocalEngine, at_once: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(devices: Sequence[int]) -> Any:
        raise CommandError("no worker can be forked now", label="start")

    break_it(group_engine, (1, signal.SIGKILL))
    with monkeypatch.context() as patch:
        patch.setattr(group_engine, "_fork", refuse)
        for _ in range(3):
            with pytest.raises(CommandError, match="no worker can be forked now"):
                group_engine.recover(step=3)
    assert group_engine.recover(step=3) == (1,)
    assert_recovered(group_engine, 2)


def test_a_device_without_a_worker_is_told(engine: LocalEngine) -> None:
    with pytest.raises(WorkerLost, match=r"device 9 was lost \(it has no worker\)"):
        engine.submit(9, "echo", value=1).result(timeout=0)


def test_a_failed_start_leaves_the_engine_as_it_was(group_engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(local, "_START_TIMEOUT_S", 0.0)
        with pytest.raises(CommandError, match="device 2 did not start"):
            group_engine.start([2])
    assert set(group_engine.pids()) == {0, 1}
    group_engine.start([2])
    assert set(group_engine.pids()) == {0, 1, 2}


def test_sigterm_is_a_notice_and_the_work_goes_on(group_engine: LocalEngine, at_once: list[float]) -> None:
    before, nap = group_engine.pids(), group_engine.submit(1, "nap", seconds=0.5)
    assert group_engine.notices() == frozenset()
    for _ in range(2):
        os.kill(before[1], signal.SIGTERM)
    assert wait_for(lambda: group_engine.notices() == {1})
    nap.result(timeout=10)
    assert_recovered(group_engine, 2)
    assert group_engine.pids() == before
    break_it(group_engine, (1, signal.SIGKILL))
    assert group_engine.recover() == (1,) and group_engine.notices() == frozenset()  # of the process that is gone
    os.kill(group_engine.pids()[0], signal.SIGTERM)
    assert wait_for(lambda: group_engine.notices() == {0})
    group_engine.release([0])
    assert group_engine.notices() == frozenset() and set(group_engine.pids()) == {1}


def test_a_worker_takes_a_notice_from_its_birth_on(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fork = engine._fork

    def fork_and_notify(devices: Sequence[int]) -> Any:
        workers = fork(devices)
        for worker in workers:
            assert wait_for(lambda: worker.pid != 0)  # noqa: B023
            os.kill(worker.pid, signal.SIGTERM)
        return workers

    monkeypatch.setattr(engine, "_fork", fork_and_notify)
    engine.start([2])
    try:
        assert wait_for(lambda: engine.notices() == {2})
    finally:
        engine.release([2])


class PaperEngine(Engine):
    """An engine without processes: each device's command ends with a prepared error after some seconds."""

    def __init__(self, ends: dict[int, tuple[float, Exception | None]]) -> None:
        super().__init__()
        self.ends = ends
        self.futures: dict[int, Future] = {}
        self.aborted = False

    def start(self, device_ids: Sequence[int]) -> None:
        """Nothing to start."""

    def release(self, device_ids: Collection[int]) -> None:
        """Nothing to stop."""

    def recover(self, timeout_s: float = 10.0, *, step: int | None = None, may_shrink: bool = False) -> tuple[int, ...]:
        return ()

    def pids(self) -> dict[int, int]:
        """No process at all."""
        return {}

    def submit(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Return a future that ends as prepared."""
        future = self.futures[device] = Future()
        if device in self.ends:
            seconds, error = self.ends[device]
            end = (lambda: future.set_exception(error)) if error else (lambda: future.set_result(device))
            threading.Timer(seconds, end).start()
        return future

    def submit_beside(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Nothing runs beside."""
        raise NotImplementedError

    def abort(self) -> None:
        """Fail what still waits, as workers do."""
        self.aborted = True
        for device, future in self.futures.items():
            if not future.done():
                future.set_exception(consequence(device))

    def close(self) -> None:
        """Nothing to free."""


def consequence(device: int) -> CommandFailed:
    return CommandFailed(device, "CommunicatorError", "rank 1 has ended", "", consequence=True)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        # peers notice before the driver does, whoever has the lower id
        (
            {0: (0.0, consequence(0)), 1: (0.2, WorkerLost(1, "exited with code 1"))},
            "device 1 was lost .* during x, step 2",
        ),
        (
            {0: (0.2, CommandFailed(0, "ValueError", "mine\nand more", "")), 1: (0.0, consequence(1))},
            "ValueError: mine$",
        ),
        ({0: (0.0, CommandFailed(0, "ValueError", "mine", ""))}, "device 0 failed during x, step 2: ValueError: mine"),
        ({0: (0.0, consequence(0)), 1: (0.0, consequence(1))}, "device 0 failed during x, step 2: CommunicatorError"),
        ({0: (0.0, None)}, r"x, step 2 did not finish within 0\.5 s on device 1"),
        (
            {1: (0.0, CommandFailed(1, "RuntimeError", "no memory", "", out_of_memory=True))},
            "device 1 ran out of memory during x, step 2: RuntimeError: no memory",
        ),
    ],
)
def test_the_root_cause_is_found(ends: dict[int, tuple[float, Exception | None]], message: str) -> None:
    engine = PaperEngine(ends)
    with pytest.raises(CommandError, match=message) as caught:
        run_command(engine, "any", {0: {}, 1: {}}, label="x", step=2, timeout_s=0.5)
    assert engine.aborted and engine.broken == str(caught.value)
    assert caught.value.step == 2 and caught.value.out_of_memory == ("memory" in message)


def test_a_failure_stops_the_commands_of_other_threads_with_its_own_reason() -> None:
    engine = PaperEngine({2: (0.3, WorkerLost(2, "silent for 15 s"))})
    errors: list[CommandError] = []

    def block() -> None:
        with pytest.raises(CommandError) as caught:
            run_command(engine, "any", {0: {}, 1: {}}, label="first", step=7)
        errors.append(caught.value)

    thread = threading.Thread(target=block)
    thread.start()
    with pytest.raises(CommandError, match="device 2 was lost"):
        run_command(engine, "any", {2: {}}, label="second", step=7)
    thread.join(timeout=5)
    assert str(errors[0]).startswith("device 2 was lost (silent for 15 s) during second")


def test_what_failed_before_a_recovery_breaks_nothing_after_it() -> None:
    engine = PaperEngine({})
    engine.mark_broken("first")
    engine.mark_broken("second")
    assert engine.broken == "first"
    engine.broken, engine.generation = None, 1
    engine.mark_broken("late", generation=0)
    assert engine.broken is None
    engine.mark_broken("third", generation=1)
    assert engine.broken == "third"


def test_a_command_that_waited_for_a_device_through_a_recovery_never_runs() -> None:
    """It was given before the failure, so whoever has recovered knows nothing of it."""
    engine = PaperEngine({1: (0.0, None)})
    errors: list[CommandError] = []

    def give() -> None:
        with pytest.raises(CommandError) as caught:
            run_command(engine, "any", {1: {}}, label="late", step=3)
        errors.append(caught.value)

    thread = threading.Thread(target=give)
    with engine.devices_locked([1]):
        thread.start()
        thread.join(timeout=0.2)  # it waits for the device
        engine.mark_broken("device 0 was lost")
        engine._recovered_from, engine.broken, engine.generation = "device 0 was lost", None, 1
    thread.join(timeout=10)
    assert [str(error) for error in errors] == ["device 0 was lost"] and not engine.futures
    assert engine.broken is None
    assert run_command(engine, "any", {1: {}}, label="next", step=3) == {1: 1}


DRIVER = """
    import os, signal, sys, time
    from nereus.runtime.engine import run_command
    from nereus.runtime.local import LocalEngine

    def raise_exit(*_):
        raise SystemExit(143)

    signal.signal(signal.SIGTERM, raise_exit)
    with LocalEngine("{service}", heartbeat_s=0.2) as engine:
        engine.start([0, 1])
        connection = dict(devices=[0, 1], epoch=1, same_host=True)
        run_command(engine, "connect", {{0: connection, 1: connection}}, label="connect", step=None)
        print(engine._nursery.pid, *engine.pids().values(), flush=True)
        if sys.argv[1] == "stop":
            os.kill(engine.pids()[1], signal.SIGSTOP)
        run_command(engine, "all_reduce_until_stopped", {{d: dict(seconds=60) for d in (0, 1)}}, label="x", step=0)
"""


@pytest.mark.parametrize(
    ("way", "number"),
    [
        ("run", signal.SIGTERM),
        pytest.param("stop", signal.SIGKILL, marks=pytest.mark.long),
        pytest.param("run", signal.SIGINT, marks=pytest.mark.long),
    ],
)
def test_whatever_ends_the_driver_nothing_is_left(way: str, number: signal.Signals) -> None:
    before = set(os.listdir("/dev/shm"))
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER).format(service=GROUP), way],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 3
        time.sleep(0.3)
        # Ctrl-C reaches the whole terminal group, so the workers too.
        os.killpg(driver.pid, number) if number == signal.SIGINT else os.kill(driver.pid, number)
        assert driver.wait(timeout=15) != 0
        assert wait_for(lambda: not any(is_running(pid) for pid in pids))
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)
    ours = [name for name in set(os.listdir("/dev/shm")) - before if "nereus" in name]
    assert not ours


def test_a_start_that_takes_too_long_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEngine(PLAIN) as engine:
        engine.start([0])  # the nursery is ready
        monkeypatch.setattr(local, "_START_TIMEOUT_S", 0.0)
        with pytest.raises(CommandError, match="device 1 did not start within 0 s") as caught:
            engine.start([1])
    assert caught.value.device == 1
