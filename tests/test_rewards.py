"""Loading reward functions, and a pool that outlives none of their faults."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nereus.rewards import RewardError, RewardPool, RewardRequest, load_reward_function

FUNCTIONS = """
import os, signal, subprocess, sys, time


class Numeric:
    def __float__(self):
        return 2.5


def length(prompt, response, example):
    print("to stdout, which must not disturb the answers")
    return len(response) + example.get("bonus", 0)


def faulty(prompt, response, example):
    if response == "raise":
        raise KeyError("no answer")
    if response == "print and raise":
        print("and this must not disturb them either", flush=True)
        raise ValueError
    if response == "hang":
        time.sleep(1000)
    if response == "spawn and hang":
        child = subprocess.Popen(["sleep", "1000"])
        with open(example["pid_file"], "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    if response == "exit":
        sys.exit(3)
    if response == "hard exit":
        os._exit(4)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return {"nan": float("nan"), "text": "1.0", "none": None, "odd": Numeric(), "true": True}.get(response, 1.0)


def knows_torch(prompt, response, example):
    return "torch" in sys.modules


def where(prompt, response, example):
    return os.getpid()


NOT_A_FUNCTION = 3
"""


@pytest.fixture
def spec(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "my_rewards.py:{}".format
    sys.modules.pop("my_rewards", None)


def request(response, sample_id=7, prompt="What is 2 + 3?", **example):
    return RewardRequest(sample_id, prompt, response, example)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def test_functions_are_loaded_from_files_and_modules(spec):
    assert load_reward_function(spec("length"))("p", "four", {}) == 4
    assert load_reward_function("my_rewards:length")("p", "four", {"bonus": 1}) == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("my_rewards", 'write "package.module:name"'),
        ("my_rewards:", 'write "package.module:name"'),
        ("no_such_module:f", "no_such_module can't be imported"),
        ("gone.py:f", "gone.py can't be imported .*no file"),
        ("broken.py:f", "broken.py can't be imported .*ZeroDivisionError"),
        ("exits.py:f", "exits.py can't be imported .*SystemExit"),
        ("my_rewards.py:missing", 'has no "missing"'),
        ("my_rewards.py:NOT_A_FUNCTION", "holds no function"),
    ],
)
def test_what_cannot_be_loaded_is_named(spec, name, said):
    Path("broken.py").write_text("1 / 0")
    Path("exits.py").write_text("import sys; sys.exit()")
    with pytest.raises(ValueError, match=rf"^reward.function is .*{said}"):
        load_reward_function(name)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_rewards_come_in_the_order_of_the_requests(spec, num_workers):
    requests = [request("x" * n, sample_id=n, bonus=0.25) for n in range(20)]
    with RewardPool(spec("length"), num_workers=num_workers) as pool:
        assert pool.score(requests) == [n + 0.25 for n in range(20)]
        assert pool.score(requests[::-1]) == [n + 0.25 for n in range(19, -1, -1)]
        assert pool.score([]) == []


def test_what_a_function_prints_stays_off_stdout(spec, capfd):
    with RewardPool(spec("length")) as pool:
        pool.score([request("x")])
    with RewardPool(spec("faulty")) as pool, pytest.raises(RewardError):
        pool.score([request("print and raise")])
    captured = capfd.readouterr()
    assert captured.out == "" and "must not disturb" in captured.err


def test_long_and_strange_texts_arrive_whole(spec):
    with RewardPool(spec("length")) as pool:
        assert pool.score([request("ü\ud800\n" * 300_000)]) == [900_000.0]


def test_workers_stay_free_of_torch_and_of_the_main_module(spec):
    import torch  # noqa: F401

    with RewardPool(spec("knows_torch")) as pool:
        assert pool.score([request("x")]) == [0.0]


def test_numbers_of_any_kind_count(spec):
    with RewardPool(spec("faulty")) as pool:
        assert pool.score([request("odd"), request("true")]) == [2.5, 1.0]


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ("raise", "it raised KeyError: 'no answer' .*my_rewards.py, line 17"),
        ("exit", "it raised SystemExit: 3"),
        ("hang", "no answer within the limit of 1 s"),
        ("hard exit", "its process ended with exit code 4"),
        ("kill", "its process was killed by SIGKILL"),
        ("nan", "it returned nan, which is not a finite number"),
        ("text", "it returned '1.0', which is not a finite number"),
        ("none", "it returned None"),
    ],
)
def test_a_fault_names_sample_prompt_and_cause_and_the_pool_recovers(spec, response, cause):
    with RewardPool(spec("faulty"), num_workers=2, timeout_s=1.0) as pool:
        pids = [worker.process.pid for worker in pool._workers]
        requests = [request("fine", n) for n in range(4)] + [request(response, 41, prompt="Q" * 100)]
        with pytest.raises(RewardError, match=rf"failed on sample 41, 'Q{{77}}\.\.\.': {cause}"):
            pool.score(requests)
        assert not any(is_alive(pid) for pid in pids)
        assert pool.score([request("fine")]) == [1.0]


def test_a_hang_is_found_while_the_other_worker_goes_on(spec):
    with RewardPool(spec("faulty"), num_workers=2, timeout_s=1.0) as pool:
        requests = [request("hang", 0)] + [request("fine", n) for n in range(1, 50)]
        with pytest.raises(RewardError, match="sample 0"):
            pool.score(requests)


def test_children_of_a_hung_function_die_with_it(spec, tmp_path):
    pid_file = tmp_path / "pids"
    with (
        RewardPool(spec("faulty"), timeout_s=1.0) as pool,
        pytest.raises(RewardError, match="no answer"),
    ):
        pool.score([request("spawn and hang", pid_file=str(pid_file))])
    pids = pid_file.read_text().split()
    assert len(pids) == 2
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def test_a_stopped_worker_is_found(spec):
    with RewardPool(spec("where"), timeout_s=1.0) as pool:
        pid = int(pool.score([request("x")])[0])
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RewardError, match="no answer within the limit"):
            pool.score([request("x")])
        assert not is_alive(pid)


def test_a_function_that_only_the_driver_can_import_is_named(spec):
    with RewardPool("gone.py:f") as pool, pytest.raises(RewardError, match=r"could not be started.*gone\.py"):
        pool.score([request("x")])


def test_a_closed_pool_starts_no_worker_again(spec):
    with RewardPool(spec("where")) as pool:
        pool.score([request("x")])
    with pytest.raises(RewardError, match="scores no more"):
        pool.score([request("x")])
    with pytest.raises(RewardError, match="scores no more"):
        pool.__enter__()
    pool.close()
    assert pool._workers == []


def test_two_threads_may_close_a_pool_that_is_scoring(spec, tmp_path):
    pid_file = tmp_path / "pids"
    pool = RewardPool(spec("faulty"), num_workers=2, timeout_s=30.0).__enter__()
    pids = [worker.process.pid for worker in pool._workers]
    with ThreadPoolExecutor(3) as threads:
        scoring = threads.submit(pool.score, [request("spawn and hang", pid_file=str(pid_file)), request("fine")])
        wait_until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 2)
        for closing in [threads.submit(pool.close) for _ in range(2)]:
            closing.result(timeout=10)
        with pytest.raises(RewardError, match="scores no more"):
            scoring.result(timeout=10)
    wait_until(lambda: not any(is_alive(pid) for pid in [*pids, *pid_file.read_text().split()]))


def test_the_end_of_the_block_reaps_every_worker(spec):
    with RewardPool(spec("where"), num_workers=2) as pool:
        pool.score([request("x")])
        processes = [worker.process for worker in pool._workers]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_its_driver(spec, tmp_path, end):
    pid_file = tmp_path / "pids"
    driver = textwrap.dedent(f"""
        from nereus.rewards import RewardPool, RewardRequest
        with RewardPool("my_rewards.py:faulty") as pool:
            pool.score([RewardRequest(0, "p", "spawn and hang", {{"pid_file": {str(pid_file)!r}}})])
    """)
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    process = subprocess.Popen([sys.executable, "-c", driver], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 2)
        process.send_signal(end)
        process.wait(timeout=10)
        pids = pid_file.read_text().split()
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
    finally:
        process.kill()
        process.wait()
