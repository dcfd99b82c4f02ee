"""A server that a killed process has started doesn't outlive it; an orderly one is left alone."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PARENT = """
import subprocess, sys, time
from flows.server_guard import find_servers, server_ends_with_us
from nereus.progress import Event, publish
server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "uvicorn"])
with server_ends_with_us():
    assert find_servers() == [server.pid]
    publish(Event("opened", "amber"))
    print(server.pid, flush=True)
    sys.stdin.readline()
assert server.poll() is None, "an orderly end is Prefect's to see to"
server.kill()
server.wait()
print("orderly", flush=True)
"""


def start_parent() -> tuple[subprocess.Popen[str], psutil.Process]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    return parent, psutil.Process(int(parent.stdout.readline()))


def test_the_server_of_a_killed_process_ends():
    parent, server = start_parent()
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    server.wait(timeout=10)


def test_an_orderly_process_leaves_its_server_to_prefect_and_no_guard_behind():
    parent, _ = start_parent()
    guards = [child for child in psutil.Process(parent.pid).children() if child.name() == "sh"]
    assert len(guards) == 1
    said, _ = parent.communicate("\n", timeout=30)
    assert said.strip() == "orderly"
    assert not psutil.wait_procs(guards, timeout=10)[1]
