"""The engine for one host: worker processes forked from a nursery, watched by one thread of the driver."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, Self

from torch.distributed import TCPStore

from nereus.runtime.deaths import Deaths
from nereus.runtime.engine import Answer, CommandError, CommandFailed, Engine, WorkerLost
from nereus.runtime.messages import MessageStream
from nereus.runtime.nursery import Nursery
from nereus.runtime.recovery import clear_aborts, end_commands
from nereus.runtime.watcher import Watcher, WorkerHandle
from nereus.runtime.worker import WorkerSettings

_START_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 2.0
_BROKEN_EXIT_TIMEOUT_S = 0.5
# After their last future has ended, commands are through when the root cause is found and told.
_LOCK_TIMEOUT_S = 30.0
# Workers may be lost while others are restarted.
_MOST_RECOVERY_ROUNDS = 4


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
            service: "package.module:Class"; modules that its `PRELOADED` names, if it has one, are imported once for
                all workers. Each worker makes one `Class(context: WorkerContext)`, a command calls a
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
        self._numbers = count(1)
        self._nursery: Nursery | None = None
        self._watcher: Watcher | None = None
        self._closed = False
        self._deaths = Deaths()
        self._recovery_lock = threading.Lock()

    def __enter__(self) -> Self:
        self._open_nursery()  # torch is imported there while the driver goes on
        return self

    def start(self, device_ids: Sequence[int]) -> None:
        """Start the workers of these devices and wait until each has made its service.

        Raises:
            CommandError: a service could not be made, or its module not be imported.
        """
        assert not self._closed, "the engine is closed"
        workers = self._fork(device_ids)
        try:
            for worker in workers:
                _wait_ready(worker)
        except BaseException:
            assert self._watcher is not None
            self._watcher.end_workers(workers, "its start failed", _EXIT_TIMEOUT_S)
            for worker in workers:
                self._watcher.remove(worker)
            raise
        self._pin_workers()

    def _fork(self, device_ids: Sequence[int]) -> list[WorkerHandle]:
        """Have workers forked, in place of lost ones on their devices; they aren't ready yet.

        Raises:
            CommandError: the service's module can't be imported.
        """
        nursery, watcher = self._open_nursery()
        try:
            failure = watcher.nursery_ready.result(_START_TIMEOUT_S)
        except TimeoutError:
            text = f"the service {self._settings.service} was not imported within {_START_TIMEOUT_S:g} s"
            raise CommandError(text, label="start") from None
        if failure:
            raise CommandError(f"the service {self._settings.service} can't be imported: {failure}", label="start")
        pairs = {device: socket.socketpair() for device in device_ids}
        workers = [watcher.add(device, MessageStream(ours)) for device, (ours, _) in pairs.items()]
        for worker in workers:
            with pairs[worker.device][1] as theirs:
                nursery.fork(worker.device, theirs, self._cores_of(worker))
        return workers

    def release(self, device_ids: Collection[int]) -> None:
        """Stop the workers of these devices once their running commands are done; the others go on."""
        assert self._watcher is not None, "nothing was started"
        with self.devices_locked(device_ids):
            workers = [self._watcher.workers[device] for device in sorted(device_ids)]
            self._watcher.end_workers(workers, "released", _EXIT_TIMEOUT_S)
            for worker in workers:
                self._watcher.remove(worker)
        self._pin_workers()

    def submit(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Send one command; the future ends with its result, `CommandFailed` or `WorkerLost`."""
        return self._send("command", device, method, kwargs)

    def submit_beside(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Send one command for the worker's threads beside the main one; the future ends as that of `submit`."""
        return self._send("beside", device, method, kwargs)

    def _send(self, kind: str, device: int, method: str, kwargs: Mapping[str, Any]) -> Future:
        assert self._watcher is not None, "nothing was started"
        future = Answer()
        number = next(self._numbers)
        stream = self._watcher.expect(device, number, future, beside=kind == "beside")
        if stream is not None:
            with contextlib.suppress(OSError):  # a closed socket: the watcher reports the loss
                stream.send((kind, number, method, kwargs))
        return future

    def abort(self) -> None:
        """Set the abort flag in all workers: every wait of a communicator raises."""
        for worker in self._live_workers():
            worker.stream.try_send(("abort",))

    def recover(self, timeout_s: float = 10.0, *, step: int | None = None, may_shrink: bool = False) -> tuple[int, ...]:
        """Make a broken engine take commands again; see `Engine.recover`. One that isn't broken is left as it is."""
        with self._recovery_lock:
            if self.broken is None or self._watcher is None:
                return ()
            end_commands(self._watcher, timeout_s)
            try:
                with self.devices_locked({*self._locks, *self._watcher.workers}, _LOCK_TIMEOUT_S):
                    return self._restart_all(timeout_s, step, may_shrink)  # here all failed commands are through
            except TimeoutError as error:
                raise CommandError(str(error), label="recovery", step=step) from error

    def _restart_all(self, timeout_s: float, step: int | None, may_shrink: bool) -> tuple[int, ...]:
        """Restart what is lost until nothing is, and begin a new generation."""
        restarted: set[int] = set()
        for _ in range(_MOST_RECOVERY_ROUNDS):
            restarted.update(self._restart_lost(step, may_shrink))
            assert self._watcher is not None
            clear_aborts(self._watcher, self._numbers, timeout_s)  # finds those that were stopped meanwhile
            lost = self._watcher.lost()
            if not lost:
                self._begin_generation()
                return tuple(sorted(restarted))
        raise CommandError(f"{lost[0].lost}, again and again", device=lost[0].device, label="recovery", step=step)

    def _begin_generation(self) -> None:
        with self._break_lock:
            self._check_open()
            self._recovered_from, self.broken = self.broken or "", None
            self.generation += 1

    def _restart_lost(self, step: int | None, may_shrink: bool) -> list[int]:
        """Restart lost workers, each after its wait, and return their devices; those that can't start are lost again.

        Raises:
            CommandError: a device was lost too often.
        """
        assert self._watcher is not None
        lost = self._watcher.lost()
        for worker in lost:
            if not worker.is_counted:
                self._deaths.note(worker.device, step)
                worker.is_counted = True
        for worker in lost:
            if not self._deaths.is_quarantined(worker.device):
                continue
            if not may_shrink:
                text = f"{worker.lost}, for the third time within ten steps; it is not used any more"
                raise CommandError(text, device=worker.device, label="recovery", step=step)
            self.quarantined.add(worker.device)
            self._watcher.remove(worker)
        lost = self._watcher.lost()
        if not lost:
            return []
        devices = [worker.device for worker in lost]
        time.sleep(max(self._deaths.take_wait_s(device) for device in devices))
        self._check_open()
        self._renew_nursery()
        for worker in self._fork(devices):
            try:
                _wait_ready(worker)
            except CommandError as error:
                self._watcher.kill(worker, str(error))
        self._pin_workers()
        return devices

    def _renew_nursery(self) -> None:
        """Open another nursery where the old one, and all its workers with it, has ended."""
        old = self._watcher
        if old is not None and not old.nursery_alive:
            old.close()
            self._nursery = None
            _, self._watcher = self._open_nursery()
            self._watcher.workers.update(old.workers)

    def _check_open(self) -> None:
        if self._closed:
            raise CommandError("the engine was closed", label="recovery")

    def pids(self) -> dict[int, int]:
        """Return the process id of each live worker."""
        return {worker.device: worker.pid for worker in self._live_workers()}

    def notices(self) -> frozenset[int]:
        """Return the devices whose worker got SIGTERM; see `Engine.notices`."""
        workers = {} if self._watcher is None else dict(self._watcher.workers)
        return frozenset(device for device, worker in workers.items() if worker.is_noticed)

    def rss_bytes(self) -> dict[int, int]:
        """Return the resident bytes of each live worker as of its last beat."""
        return {worker.device: worker.rss_bytes for worker in self._live_workers()}

    def close(self) -> None:
        """Stop all workers and free everything; may be called twice."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._watcher is not None:
                timeout_s = _EXIT_TIMEOUT_S if self.broken is None else _BROKEN_EXIT_TIMEOUT_S
                self._watcher.end_workers(self._live_workers(), "the engine was closed", timeout_s)
        finally:
            if self._watcher is not None:
                self._watcher.close()
            self.broken = self.broken or "it was closed"
            del self._store

    def _open_nursery(self) -> tuple[Nursery, Watcher]:
        if self._nursery is None or self._watcher is None:
            self._nursery = Nursery(self._settings)
            heartbeat_s = self._settings.heartbeat_s
            self._watcher = Watcher(self._nursery, heartbeat_s=heartbeat_s, silent_after_s=self._silent_after_s)
        return self._nursery, self._watcher

    def _live_workers(self) -> list[WorkerHandle]:
        return [] if self._watcher is None else self._watcher.live()

    def _cores_of(self, worker: WorkerHandle) -> list[int] | None:
        """Return the cores of a worker's slot, or None when there are too few for all workers."""
        threads = self._settings.threads
        if (max(other.slot for other in self._live_workers()) + 1) * threads > len(self._cores):
            return None
        return self._cores[worker.slot * threads : (worker.slot + 1) * threads]

    def _pin_workers(self) -> None:
        """Pin all threads of all workers anew: the number of workers may have passed that of the cores."""
        for worker in self._live_workers():
            cores = self._cores_of(worker) or self._cores
            with contextlib.suppress(OSError):  # a thread or the process has just ended
                for thread in os.listdir(f"/proc/{worker.pid}/task"):
                    os.sched_setaffinity(int(thread), cores)


def _wait_ready(worker: WorkerHandle) -> None:
    try:
        worker.ready.result(_START_TIMEOUT_S)
    except TimeoutError:
        text = f"device {worker.device} did not start within {_START_TIMEOUT_S:g} s"
        raise CommandError(text, device=worker.device, label="start") from None
    except CommandFailed as error:
        text = f"device {error.device} failed during start: {error.error_type}: {error.message}"
        out_of_memory = error.out_of_memory
        raise CommandError(text, device=error.device, label="start", out_of_memory=out_of_memory) from error
    except WorkerLost as error:
        text = f"device {error.device} was lost ({error.reason}) during start"
        raise CommandError(text, device=error.device, label="start") from error


def _open_store() -> TCPStore:
    """Return a TCPStore that serves on the loopback interface only."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
