"""A process is known to have ended only when that is sure."""

import os
import signal
import subprocess
import sys

from storage import process_identity
from storage.process_identity import has_died, own_identity


def test_this_process_lives():
    assert own_identity() == own_identity()
    assert not has_died(own_identity())


def test_a_killed_process_has_died_though_its_parent_has_not_asked():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    identity = [*own_identity()[:2], process.pid, _start_of(process.pid)]
    assert not has_died(identity)
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
    assert has_died(identity)
    process.wait()
    assert has_died(identity)


def test_another_process_with_the_same_pid_is_another():
    boot, namespace, pid, start = own_identity()
    assert has_died([boot, namespace, pid, start - 1])


def test_of_other_machines_nothing_is_known():
    boot, namespace, *_ = own_identity()
    for identity in (None, [], "x", ["other", namespace, 1, 1], [boot, 0, 1, 1], [boot, namespace, "1", 1]):
        assert not has_died(identity), identity


def test_a_process_that_proc_hides_has_not_died(monkeypatch):
    """It belongs to another user, and /proc is mounted with hidepid."""
    boot, namespace, *_ = own_identity()

    def hide(pid):
        raise FileNotFoundError(pid)

    def forbid(pid, number):
        raise PermissionError("not yours")

    monkeypatch.setattr(process_identity, "_start", hide)
    monkeypatch.setattr(os, "kill", forbid)
    assert not has_died([boot, namespace, 1, 1])


def _start_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])
