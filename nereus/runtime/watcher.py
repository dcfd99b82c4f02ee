"""The driver's side of its workers: one thread that receives from all, completes futures and finds the lost."""

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nereus.runtime.engine import Answer, CommandFailed, WorkerLost
from nereus.runtime.messages import MessageStream
from nereus.runtime.nursery import Nursery

_KILL_TIMEOUT_S = 5.0
_NURSERY_ENDED = "the process that forks workers ended"


@dataclass
class WorkerHandle:
    """The driver's view of one worker.

    Attributes:
        device: the device's id.
        stream: the driver's end of its connection.
        slot: which block of cores it may be pinned to.
        pid: 0 until the fork was reported.
        ready: ends when the service was made.
        futures: commands under way, by number.
        beside: commands under way beside those.
        gone: set after the process was reaped.
        lost: why no more commands are taken, or None.
        is_counted: the loss was taken note of by who restarts.
        is_noticed: it was told that its device will go.
    """

    device: int
    stream: MessageStream
    slot: int
    pid: int = 0
    rss_bytes: int = 0
    ready: Future = field(default_factory=Future)
    futures: dict[int, Future] = field(default_factory=dict)
    beside: dict[int, Future] = field(default_factory=dict)
    gone: threading.Event = field(default_factory=threading.Event)
    lost: WorkerLost | None = None
    is_counted: bool = False
    is_noticed: bool = False
    last_beat_s: float = field(default_factory=time.monotonic)
    end_of_file: bool = False
    kill_reason: str | None = None


class Watcher:
    """Owns the workers of one nursery from fork to reaping; see the module's text."""

    def __init__(self, nursery: Nursery, *, heartbeat_s: float, silent_after_s: float) -> None:
        self.workers: dict[int, WorkerHandle] = {}
        self.nursery_ready: Future = Future()  # None, or why the service can't be imported
        self._nursery = nursery
        self.nursery_alive = True
        self._heartbeat_s = heartbeat_s
        self._silent_after_s = silent_after_s
        self._oom_kills = _count_oom_kills()
        self._lock = threading.RLock()
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="nereus-watcher", daemon=True)
        self._thread.start()

    def add(self, device: int, stream: MessageStream) -> WorkerHandle:
        """Enter a worker that is about to be forked, in place of a lost one on its device."""
        with self._lock:
            old = self.workers.pop(device, None)
            if old is not None:
                assert old.lost is not None, f"device {device} has a worker already"
                old.stream.close()
            used = {worker.slot for worker in self.workers.values()}
            slot = next(slot for slot in range(len(used) + 1) if slot not in used)
            worker = self.workers[device] = WorkerHandle(device, stream, slot)
        self._wake(b".")
        return worker

    def remove(self, worker: WorkerHandle) -> None:
        """Forget a worker that is gone."""
        with self._lock:
            self._lose(worker, "released")
            del self.workers[worker.device]
        worker.stream.close()

    def live(self) -> list[WorkerHandle]:
        """Return the workers that take commands."""
        with self._lock:
            return [worker for worker in self.workers.values() if worker.lost is None]

    def lost(self) -> list[WorkerHandle]:
        """Return the workers that were lost and have no successor yet."""
        with self._lock:
            return [worker for worker in self.workers.values() if worker.lost is not None]

    def commands_of(self, worker: WorkerHandle) -> list[Future]:
        """Return the futures of a worker's commands under way, without those beside them."""
        with self._lock:
            return list(worker.futures.values())

    def expect(self, device: int, number: int, future: Future, *, beside: bool = False) -> MessageStream | None:
        """Enter a command that is about to be sent; return where to, or None if its worker is lost."""
        with self._lock:
            worker = self.workers.get(device)
            if worker is not None and worker.lost is None:
                (worker.beside if beside else worker.futures)[number] = future
                return worker.stream
        future.set_exception(WorkerLost(device, "it has no worker") if worker is None else worker.lost)
        return None

    def end_workers(self, workers: Sequence[WorkerHandle], reason: str, timeout_s: float) -> None:
        """Ask workers to exit, kill those that don't within the time, and wait until all are reaped."""
        deadline = time.monotonic() + timeout_s
        try:
            for worker in workers:
                worker.kill_reason = worker.kill_reason or reason
                worker.stream.try_send(("exit",))
            for worker in workers:
                worker.gone.wait(max(0.0, deadline - time.monotonic()))
        finally:
            for worker in workers:
                self._kill(worker, reason)
        for worker in workers:
            worker.gone.wait(_KILL_TIMEOUT_S)

    def kill(self, worker: WorkerHandle, reason: str) -> None:
        """Kill a worker and return when it is lost, even where the system takes its time to end it."""
        self._kill(worker, reason)
        worker.gone.wait(_KILL_TIMEOUT_S)
        self._lose(worker, reason)

    def close(self) -> None:
        """End the thread, the nursery and whatever worker still lives."""
        self._wake(b"x")
        self._thread.join()
        self._nursery.close(at_once=not self.nursery_ready.done())
        os.close(self._wake_read)
        os.close(self._wake_write)
        for worker in self.workers.values():
            self._lose(worker, "the engine was closed")
            worker.stream.close()

    def _wake(self, message: bytes) -> None:
        os.write(self._wake_write, message)

    def _watch(self) -> None:
        """Watch until `close`; whatever goes wrong here, nobody is left waiting."""
        try:
            while self._watch_once():
                pass
        except BaseException as error:
            self._lose_all(f"its messages could not be read: {error!r}")
            raise

    def _watch_once(self) -> bool:
        """Handle what has arrived within one poll; return False when `close` has asked to stop."""
        poll_s = min(self._heartbeat_s, self._silent_after_s / 4, 1.0)
        sources: list[Any] = [worker.stream for worker in self.live() if not worker.end_of_file]
        if self.nursery_alive:
            sources.append(self._nursery)
        began_s = time.monotonic()
        readable = multiprocessing.connection.wait([self._wake_read, *sources], poll_s)
        paused = time.monotonic() - began_s > poll_s + self._heartbeat_s
        if self._wake_read in readable and b"x" in os.read(self._wake_read, 4096):
            return False
        for worker in self.live():
            if worker.stream in readable:
                self._receive_from(worker)
        if self._nursery in readable:
            self._receive_from_nursery()
        self._check_silence(paused)
        return True

    def _receive_from(self, worker: WorkerHandle) -> None:
        try:
            messages = worker.stream.receive_available()
        except EOFError:
            worker.end_of_file = True  # the nursery tells why
            return
        for kind, *rest in messages:
            worker.last_beat_s = time.monotonic()
            if kind == "beat":
                (worker.rss_bytes,) = rest
            elif kind == "notice":
                worker.is_noticed = True
            elif kind == "ready":
                (worker.pid,) = rest
                worker.ready.set_result(None)
            elif kind == "result":
                number, result, times = rest
                future = self._take_future(worker, number)
                if isinstance(future, Answer):
                    future.times = times
                future.set_result(result)
            elif kind == "failed":
                number, description = rest
                future = worker.ready if number == 0 else self._take_future(worker, number)
                future.set_exception(CommandFailed(worker.device, **description))

    def _take_future(self, worker: WorkerHandle, number: int) -> Future:
        with self._lock:
            return (worker.futures if number in worker.futures else worker.beside).pop(number)

    def _receive_from_nursery(self) -> None:
        event = self._nursery.receive_event()
        if event is None:
            self.nursery_alive = False
            if not self.nursery_ready.done():
                self.nursery_ready.set_result(_NURSERY_ENDED)
            self._lose_all(_NURSERY_ENDED)
        elif "ready" in event or "failed" in event:
            self.nursery_ready.set_result(event.get("failed"))
        elif "forked" in event:
            worker = self.workers.get(event["forked"])
            if worker is not None:  # else it took so long that it was given up; its end of the socket is closed
                worker.pid = event["pid"]
        elif "exited" in event:
            worker = self.workers.get(event["exited"])
            if worker is not None and worker.pid == event["pid"]:
                self._receive_from(worker)  # what it sent before it ended
                self._lose(worker, worker.kill_reason or _describe_exit(event["code"]), event["code"])

    def _check_silence(self, paused: bool) -> None:
        """Kill workers without a beat; if this process itself was paused, all start anew."""
        now = time.monotonic()
        for worker in self.live():
            if paused:
                worker.last_beat_s = now
            elif now - worker.last_beat_s > self._silent_after_s:
                self._kill(worker, f"silent for {self._silent_after_s:g} s")

    def _kill(self, worker: WorkerHandle, reason: str) -> None:
        """Kill a worker; the nursery's report makes it lost."""
        with self._lock:
            if worker.gone.is_set() or not worker.pid:
                return
            worker.kill_reason = worker.kill_reason or reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def _lose(self, worker: WorkerHandle, reason: str, code: int = 0) -> None:
        """Mark a worker as lost and fail all that waits for it."""
        with self._lock:
            if worker.lost is not None:
                return
            out_of_memory = False
            if code == -signal.SIGKILL and worker.kill_reason is None:
                kills = _count_oom_kills()
                out_of_memory, self._oom_kills = kills > self._oom_kills, kills
            if out_of_memory:
                reason += ", the system was out of memory"
            worker.lost = WorkerLost(worker.device, reason, out_of_memory=out_of_memory)
            waiting = [*worker.futures.values(), *worker.beside.values()]
            waiting += [] if worker.ready.done() else [worker.ready]
            worker.futures.clear()
            worker.beside.clear()
        worker.gone.set()
        for future in waiting:
            future.set_exception(worker.lost)

    def _lose_all(self, reason: str) -> None:
        for worker in self.live():
            self._kill(worker, reason)
            self._lose(worker, reason)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    return f"exited with signal {-code} ({signal.Signals(-code).name})"


def _count_oom_kills() -> int:
    """Return how many processes of our control group the system has killed for want of memory."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        events = Path(f"/sys/fs/cgroup{group}/memory.events").read_text()
        return int(events.partition("oom_kill ")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return 0
