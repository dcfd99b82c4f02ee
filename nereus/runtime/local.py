"""The engine for one host: worker processes forked from a nursery, watched by one thread of the driver."""

import contextlib
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch.distributed import TCPStore

from nereus.runtime.engine import CommandError, CommandFailed, Engine, WorkerLost
from nereus.runtime.messages import MessageStream
from nereus.runtime.nursery import Nursery
from nereus.runtime.worker import WorkerSettings

_START_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 2.0
_KILL_TIMEOUT_S = 5.0


@dataclass
class _Worker:
    """The driver's view of one worker; `pid` is 0 until the fork was reported, `gone` is set after the exit was."""

    device: int
    stream: MessageStream
    ready: Future = field(default_factory=Future)
    futures: dict[int, Future] = field(default_factory=dict)
    gone: threading.Event = field(default_factory=threading.Event)
    pid: int = 0
    slot: int = 0
    rss_bytes: int = 0
    last_beat_s: float = field(default_factory=time.monotonic)
    end_of_file: bool = False
    kill_reason: str | None = None
    lost: WorkerLost | None = None


class LocalEngine(Engine):
    """Worker processes on this host, one a device.

    Use it as a context manager. A worker that ends or hangs (no beat for `silent_after_s`) is reported through the
    futures of its commands; when the driver dies, by whatever signal, nursery and workers end by themselves.
    """

    def __init__(
        self,
        service: str,
        *,
        device: str = "cpu",
        threads_per_device: int = 1,
        memory_per_device_bytes: int | None = None,
        heartbeat_s: float = 1.0,
        silent_after_s: float = 15.0,
        log_dir: str | Path | None = None,
    ) -> None:
        """Describe the workers; none is started yet.

        Args:
            service: "package.module:Class"; each worker makes one `Class(context: WorkerContext)`, a command calls a
                method of it. A method `close`, if there is one, is called at the worker's orderly end.
            device: "cpu" or "cuda"; a device's id is its index.
            threads_per_device: torch threads, and cores that a worker is pinned to while there are enough.
            memory_per_device_bytes: cap above what the worker holds before its first tensor (RLIMIT_DATA, CPU only).
            heartbeat_s: seconds between two beats of a worker.
            silent_after_s: seconds without a beat after which a worker is killed and lost.
            log_dir: existing directory for `device-<id>.log` (stdout and stderr); None: workers share our stderr.
        """
        super().__init__()
        self._store = _open_store()
        self.store_address = ("127.0.0.1", self._store.port)
        self._settings = WorkerSettings(
            service=service,
            device_type=device,
            threads=threads_per_device,
            memory_bytes=memory_per_device_bytes,
            heartbeat_s=heartbeat_s,
            log_dir=None if log_dir is None else str(log_dir),
            store_address=self.store_address,
        )
        self._silent_after_s = silent_after_s
        self._cores = sorted(os.sched_getaffinity(0))
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.RLock()
        self._command_number = 0
        self._nursery: Nursery | None = None
        self._nursery_ready: Future = Future()
        self._oom_kills = _count_oom_kills()
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._watcher = threading.Thread(target=self._watch, name="nereus-engine", daemon=True)

    def __enter__(self) -> Self:
        self._open_nursery()  # torch is imported there while the driver goes on
        return self

    def start(self, device_ids: Sequence[int]) -> None:
        """Start the workers of these devices and wait until each has made its service.

        Raises:
            CommandError: a service could not be made, or its module not be imported.
        """
        assert not self._closing, "the engine is closed"
        self._open_nursery()
        assert self._nursery is not None
        if failure := self._nursery_ready.result(_START_TIMEOUT_S):
            raise CommandError(f"the service {self._settings.service} can't be imported: {failure}", label="start")
        added = [self._add_worker(device) for device in device_ids]
        for worker, theirs in added:
            with theirs:
                self._nursery.fork(worker.device, theirs, self._cores_of(worker.slot))
        self._wake()
        for worker, _ in added:
            self._wait_ready(worker)
        self._pin_workers()

    def release(self, device_ids: Collection[int]) -> None:
        """Stop the workers of these devices once their running commands are done; the others go on."""
        with self.devices_locked(device_ids):
            workers = [self._workers[device] for device in sorted(device_ids)]
            self._stop(workers, "released", _EXIT_TIMEOUT_S)
            with self._lock:
                for worker in workers:
                    del self._workers[worker.device]
        self._pin_workers()

    def submit(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Send one command; the future ends with its result, `CommandFailed` or `WorkerLost`."""
        future: Future = Future()
        with self._lock:
            worker = self._workers[device]
            self._command_number += 1
            number = self._command_number
            if worker.lost is not None:
                future.set_exception(worker.lost)
                return future
            worker.futures[number] = future
        with contextlib.suppress(OSError):  # a closed socket: the watcher reports the loss
            worker.stream.send(("command", number, method, kwargs))
        return future

    def abort(self) -> None:
        """Set the abort flag in all workers: every wait of a communicator raises."""
        for worker in self._live_workers():
            worker.stream.try_send(("abort",))

    def pids(self) -> dict[int, int]:
        """Return the process id of each live worker."""
        return {worker.device: worker.pid for worker in self._live_workers()}

    def rss_bytes(self) -> dict[int, int]:
        """Return the resident bytes of each live worker as of its last beat."""
        return {worker.device: worker.rss_bytes for worker in self._live_workers()}

    def close(self) -> None:
        """Stop all workers and free everything; may be called twice."""
        if self._closing:
            return
        self._closing = True
        try:
            self._stop(self._live_workers(), "the engine was closed", _EXIT_TIMEOUT_S if self.broken is None else 0.5)
        finally:
            self._close_nursery()
            self.broken = self.broken or "it was closed"
            del self._store

    def _open_nursery(self) -> None:
        with self._lock:
            if self._nursery is None:
                self._nursery = Nursery(self._settings)
                self._watcher.start()

    def _close_nursery(self) -> None:
        os.write(self._wake_write, b"x")
        if self._nursery is not None:
            self._watcher.join()
            self._nursery.close()  # kills what is left
        os.close(self._wake_read)
        os.close(self._wake_write)
        for worker in self._workers.values():
            self._lose(worker, "the engine was closed")
            worker.stream.close()

    def _wait_ready(self, worker: _Worker) -> None:
        try:
            worker.ready.result(_START_TIMEOUT_S)
        except CommandFailed as error:
            text = f"device {error.device} failed during start: {error.error_type}: {error.message}"
            out_of_memory = error.out_of_memory
            raise CommandError(text, device=error.device, label="start", out_of_memory=out_of_memory) from error
        except WorkerLost as error:
            text = f"device {error.device} was lost ({error.reason}) during start"
            raise CommandError(text, device=error.device, label="start") from error

    def _add_worker(self, device: int) -> tuple[_Worker, socket.socket]:
        """Enter a worker that is to be forked; return it and the socket that is to be its own."""
        ours, theirs = socket.socketpair()
        with self._lock:
            old = self._workers.get(device)
            assert old is None or old.lost is not None, f"device {device} has a worker already"
            used = {worker.slot for worker in self._workers.values() if worker is not old}
            slot = next(slot for slot in range(len(used) + 1) if slot not in used)
            worker = self._workers[device] = _Worker(device, MessageStream(ours), slot=slot)
        return worker, theirs

    def _cores_of(self, slot: int) -> list[int] | None:
        """Return the cores of a slot, or None when there are too few for all workers."""
        threads = self._settings.threads
        if (max(worker.slot for worker in self._workers.values()) + 1) * threads > len(self._cores):
            return None
        return self._cores[slot * threads : (slot + 1) * threads]

    def _pin_workers(self) -> None:
        """Pin all threads of all workers anew: the number of workers may have passed that of the cores."""
        for worker in self._live_workers():
            cores = self._cores_of(worker.slot) or self._cores
            with contextlib.suppress(OSError):  # a thread or the process has just ended
                for thread in os.listdir(f"/proc/{worker.pid}/task") if worker.pid else []:
                    os.sched_setaffinity(int(thread), cores)

    def _live_workers(self) -> list[_Worker]:
        with self._lock:
            return [worker for worker in self._workers.values() if worker.lost is None]

    def _stop(self, workers: Sequence[_Worker], reason: str, timeout_s: float) -> None:
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

    def _kill(self, worker: _Worker, reason: str) -> None:
        with self._lock:
            if worker.gone.is_set() or not worker.pid:
                return
            worker.kill_reason = worker.kill_reason or reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)

    def _wake(self) -> None:
        os.write(self._wake_write, b".")

    # What follows runs in the watcher thread.

    def _watch(self) -> None:
        """Watch until `close`; whatever goes wrong here, nobody is left waiting."""
        try:
            self._watch_loop()
        except BaseException as error:
            for worker in self._live_workers():
                self._kill(worker, "")
                self._lose(worker, f"its messages could not be read: {error!r}")
            raise

    def _watch_loop(self) -> None:
        """Receive from nursery and workers, and find silent workers, until `close` writes an x."""
        nursery_alive = True
        poll_s = min(self._settings.heartbeat_s, self._silent_after_s / 4, 1.0)
        while True:
            sources: list[Any] = [worker.stream for worker in self._live_workers() if not worker.end_of_file]
            if nursery_alive:
                sources.append(self._nursery)
            began_s = time.monotonic()
            readable = multiprocessing.connection.wait([self._wake_read, *sources], poll_s)
            paused = time.monotonic() - began_s > poll_s + self._settings.heartbeat_s
            if self._wake_read in readable and b"x" in os.read(self._wake_read, 4096):
                return
            for worker in self._live_workers():
                if worker.stream in readable:
                    self._receive_from(worker)
            if self._nursery in readable:
                nursery_alive = self._receive_from_nursery()
            self._check_silence(paused)

    def _receive_from(self, worker: _Worker) -> None:
        try:
            messages = worker.stream.receive_available()
        except EOFError:
            worker.end_of_file = True  # the nursery tells why
            return
        for kind, *rest in messages:
            worker.last_beat_s = time.monotonic()
            if kind == "beat":
                (worker.rss_bytes,) = rest
            elif kind == "ready":
                (worker.pid,) = rest
                worker.ready.set_result(None)
            elif kind == "result":
                self._take_future(worker, rest[0]).set_result(rest[1])
            elif kind == "failed":
                number, description = rest
                future = worker.ready if number == 0 else self._take_future(worker, number)
                future.set_exception(CommandFailed(worker.device, **description))

    def _take_future(self, worker: _Worker, number: int) -> Future:
        with self._lock:
            return worker.futures.pop(number)

    def _receive_from_nursery(self) -> bool:
        """Handle one event; return False when the nursery is gone, and all workers with it."""
        assert self._nursery is not None
        event = self._nursery.receive_event()
        if event is None:
            if not self._nursery_ready.done():
                self._nursery_ready.set_result("the process that forks workers ended")
            for orphan in self._live_workers():
                self._kill(orphan, "the process that forks workers ended")
                self._lose(orphan, "the process that forks workers ended")
            return False
        if "ready" in event or "failed" in event:
            self._nursery_ready.set_result(event.get("failed"))
        elif "forked" in event:
            with self._lock:
                self._workers[event["forked"]].pid = event["pid"]
        elif "exited" in event:
            worker = self._workers.get(event["exited"])
            if worker is not None and worker.pid == event["pid"]:
                self._receive_from(worker)  # what it sent before it ended
                self._lose(worker, worker.kill_reason or _describe_exit(event["code"]), event["code"])
        return True

    def _lose(self, worker: _Worker, reason: str, code: int = 0) -> None:
        """Mark a worker as lost and fail all that waits for it."""
        with self._lock:
            if worker.lost is not None:
                return
            out_of_memory = False
            if code == -signal.SIGKILL and worker.kill_reason is None and (kills := _count_oom_kills()):
                out_of_memory, self._oom_kills = kills > self._oom_kills, kills
            if out_of_memory:
                reason += ", the system was out of memory"
            worker.lost = WorkerLost(worker.device, reason, out_of_memory=out_of_memory)
            waiting = [*worker.futures.values(), *([] if worker.ready.done() else [worker.ready])]
            worker.futures.clear()
        worker.gone.set()
        for future in waiting:
            future.set_exception(worker.lost)

    def _check_silence(self, paused: bool) -> None:
        """Kill workers without a beat; if this process itself was paused, all start anew."""
        now = time.monotonic()
        for worker in self._live_workers():
            if paused:
                worker.last_beat_s = now
            elif now - worker.last_beat_s > self._silent_after_s:
                self._kill(worker, f"silent for {self._silent_after_s:g} s")


def _open_store() -> TCPStore:
    """Return a TCPStore that serves on the loopback interface only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


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
