"""The nursery: a process that imports torch and the service once and then forks workers in milliseconds.

Both ends are here: `Nursery` in the driver, `main` in the process `python -m nereus.runtime.nursery`. They talk over an
anonymous socket pair: one JSON object a packet; a request to fork carries the worker's own socket along. So there is
no file, no name and no port to leave behind. When the driver is gone, by whatever signal, the nursery reads an end of
file (or finds that its parent changed), kills its children and ends.

Python's own forkserver isn't used: it runs the driver's main module again, which takes seconds under an orchestrator.
"""

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import traceback
from dataclasses import asdict
from typing import Any

from nereus.runtime.worker import WorkerSettings, load_service, run_worker

_PACKET_BYTES = 1 << 16
_PARENT_CHECK_S = 1.0


class Nursery:
    """The driver's end of the nursery process; see the module's text."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "THP_MEM_ALLOC_ENABLE": "1",  # fresh memory at 17 GB/s instead of 2.6
            # Tensors freed inside a stage are used again instead of going back page by page; the worker trims after it.
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
            # oneDNN keeps a compiled kernel of about 0.6 MB for each product shape: bound them, or memory creeps up.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
            "LRU_CACHE_CAPACITY": "64",
            "OMP_NUM_THREADS": str(settings.threads),
            "OPENBLAS_NUM_THREADS": "1",  # numpy would start threads of its own before the fork
        }
        command = [sys.executable, "-P", "-m", "nereus.runtime.nursery"]
        command += [str(theirs.fileno()), json.dumps(asdict(settings))]
        # A Ctrl-C before the child ignores it would kill it, so it is born with SIGINT blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,  # signals to the driver's group are the driver's to answer
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    @property
    def pid(self) -> int:
        """The nursery's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Return the control socket's descriptor, so that the nursery can be given to `select`."""
        return self._control.fileno()

    def fork(self, device: int, connection: socket.socket, cores: list[int] | None) -> None:
        """Ask for a worker that talks over `connection`; its pid comes as an event."""
        packet = json.dumps({"device": device, "cores": cores}).encode()
        socket.send_fds(self._control, [packet], [connection.fileno()])

    def receive_event(self) -> dict[str, Any] | None:
        """Return one event: {"ready"}, {"failed"}, {"forked", "pid"}, {"exited", "pid", "code"}; None at the end."""
        try:
            packet = self._control.recv(_PACKET_BYTES)
        except ConnectionError:
            return None
        return json.loads(packet) if packet else None

    def close(self, *, at_once: bool = False) -> None:
        """End the nursery and every worker that still lives; `at_once` while it still imports and has no workers."""
        self._control.close()
        if at_once:
            self._process.kill()
        try:
            self._process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _NurseryProcess:
    """The nursery's own loop: fork on request, report what ended."""

    def __init__(self, control: socket.socket, settings: WorkerSettings) -> None:
        self._control = control
        self._settings = settings
        self._children: dict[int, tuple[int, int]] = {}  # pid handle -> (pid, device)
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Serve until the driver is gone."""
        parent = os.getppid()
        try:
            service = load_service(self._settings.service)
            for module in getattr(service, "PRELOADED", ()):
                importlib.import_module(module)
        except Exception as error:
            traceback.print_exc()
            self._report({"failed": f"{type(error).__name__}: {error}"[:1000]})
            return
        gc.collect()
        gc.freeze()  # the collector would otherwise touch, and so copy, the pages shared with the workers
        self._report({"ready": os.getpid()})
        self._selector.register(self._control, selectors.EVENT_READ)
        while os.getppid() == parent:
            for key, _ in self._selector.select(_PARENT_CHECK_S):
                if key.fileobj is not self._control:
                    self._reap(key.fd)
                elif not self._serve(service):
                    return

    def end_children(self) -> None:
        """Kill and reap all workers; a stopped one can't end by itself."""
        for handle, (pid, _) in self._children.items():
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _serve(self, service: type) -> bool:
        """Answer one request; return False at the driver's end of file."""
        packet, descriptors, _, _ = socket.recv_fds(self._control, _PACKET_BYTES, 1)
        if not packet:
            return False
        request = json.loads(packet)
        connection = socket.socket(fileno=descriptors[0])
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # to a worker it is a notice
        pid = os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        else:
            self._control.close()
            for handle in self._children:
                os.close(handle)
            self._selector.close()
            run_worker(connection, self._settings, service, request["device"], request["cores"])
        connection.close()
        handle = os.pidfd_open(pid)
        self._children[handle] = (pid, request["device"])
        self._selector.register(handle, selectors.EVENT_READ)
        self._report({"forked": request["device"], "pid": pid})
        return True

    def _reap(self, handle: int) -> None:
        pid, device = self._children.pop(handle)
        self._selector.unregister(handle)
        os.close(handle)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._report({"exited": device, "pid": pid, "code": code})

    def _report(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the driver is gone; the next select says so
            self._control.send(json.dumps(event).encode())


def main() -> None:
    """Run the nursery process; arguments: the control socket's descriptor, the settings as JSON."""
    # A whole control group may be told to go: the driver decides, and has its last commit to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    fields = json.loads(sys.argv[2])
    settings = WorkerSettings(**{**fields, "store_address": tuple(fields["store_address"])})
    nursery = _NurseryProcess(socket.socket(fileno=int(sys.argv[1])), settings)
    try:
        nursery.run()
    finally:
        nursery.end_children()
        os._exit(0)  # nothing to tear down, and torch takes its time over it


if __name__ == "__main__":
    main()
