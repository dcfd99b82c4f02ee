"""A worker process: runs commands in order on one service object, with its memory counted and its death noticed.

The main thread runs commands; a few threads run commands beside them, which wait for storage and use no communicator;
one reads the driver's messages (commands, abort, clear, exit; an end of file means that the driver is gone: the process
ends at once); one sends a beat every `heartbeat_s`, even during a long command; one passes SIGTERM on as a notice.
"""

import contextlib
import ctypes
import errno
import importlib
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nereus.limits import MOST_SHARDS_IN_FLIGHT
from nereus.runtime.command_times import Spending
from nereus.runtime.messages import MessageStream
from nereus.runtime.waiting import CommunicatorError

# A command in flight when the worker is told to exit gets this long to notice the abort flag.
_EXIT_GRACE_S = 1.0
_Command = tuple[int, str, dict[str, Any]]
# The system caps what is mapped, and a heap has more mapped than is used: it keeps what was freed in its midst.
HEAP_ALLOWANCE = 1.5
# Stacks of threads that start under the cap, and the heaps that they are given: mapped, hardly touched. Those of the
# thread pool come on top.
_STACKS_BYTES, _POOL_STACK_BYTES = 32 << 20, 8 << 20
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
# Threads beside the main one get this much less of a core that both want (Linux has a niceness for each thread).
_BESIDE_NICENESS = 5
# Python lets a thread keep the interpreter for 5 ms while others wait, as long as two decoding passes of a small model:
# with threads that write staged state beside it, generation took 1.5 times as long.
_SWITCH_INTERVAL_S = 2e-4
# One for each shard under way, and one for copies, for which an update waits: they must not stand behind slow stores.
_BESIDE_THREADS = MOST_SHARDS_IN_FLIGHT + 1
_CPU_ALLOCATOR_ERRORS = ("can't allocate memory", "Cannot allocate memory", "std::bad_alloc",
                         "can't start new thread")  # fmt: skip
# In Python a thread whose first memory is refused never says that it has begun, and who has started it waits for ever:
# a thread that is still about to begin after so many beats ends the process.
_MOST_BEATS_TO_BEGIN = 5
# What oneDNN says where it can't map memory for the code that it generates; of shapes it can't do, it says more.
_ONEDNN_REFUSAL = "could not create a primitive"


@dataclass(frozen=True)
class WorkerSettings:
    """What all workers of an engine share; travels as JSON from the driver to the nursery."""

    service: str
    device_type: str
    threads: int
    memory_bytes: int | None
    heartbeat_s: float
    log_dir: str | None
    store_address: tuple[str, int]


@dataclass
class WorkerContext:
    """What a service is made with.

    Attributes:
        device: the device's id.
        torch_device: where its tensors live.
        store_address: host and port of the driver's TCPStore, for communicators.
        abort: set when every wait for peers must end.
        threads: torch threads of this worker.
        host_cores: cores that threads beside the main one may use.
        spending: what communicators add to while a command runs.
        baseline_rss_bytes: resident bytes before the first tensor.
    """

    device: int
    torch_device: torch.device
    store_address: tuple[str, int]
    abort: threading.Event
    threads: int
    host_cores: frozenset[int] = frozenset()
    spending: Spending = field(default_factory=Spending)
    baseline_rss_bytes: int = 0
    _baseline_file_backed_bytes: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.baseline_rss_bytes = self.baseline_rss_bytes or rss_bytes()
        self.baseline_data_bytes = _read_status_bytes("VmData")
        self._baseline_file_backed_bytes = _read_status_bytes("RssFile")

    @property
    def stacks_bytes(self) -> int:
        """What may be mapped beside the cap."""
        return _STACKS_BYTES + (self.threads - 1) * _POOL_STACK_BYTES

    def reset_peak_memory(self) -> None:
        """Begin a new measurement of `peak_memory_bytes`."""
        if self.torch_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            return
        reset_peak_rss()

    def peak_memory_bytes(self) -> int:
        """Return the most bytes held since the last reset (or the start).

        On the CPU: peak RSS above the baseline, touched shared memory included. Pages of libraries that were first
        used since the start are no data and don't count. On CUDA: the allocator's statistics.
        """
        if self.torch_device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.torch_device)
        library_bytes = max(0, _read_status_bytes("RssFile") - self._baseline_file_backed_bytes)
        return max(0, peak_rss_bytes() - self.baseline_rss_bytes - library_bytes)

    def mapped_bytes(self) -> int:
        """Return the share of its cap that a CPU worker has mapped now, in bytes of the cap; on CUDA 0.

        The heap keeps what was freed in its midst, so this is close to its most so far.
        """
        if self.torch_device.type == "cuda":
            return 0
        mapped = _read_status_bytes("VmData") - self.baseline_data_bytes - self.stacks_bytes
        return int(max(0, mapped) / HEAP_ALLOWANCE)


def rss_bytes() -> int:
    """Return the resident bytes of this process now, touched shared memory included."""
    return _read_status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Return the most resident bytes since `reset_peak_rss` (or the process's start)."""
    return _read_status_bytes("VmHWM")


def reset_peak_rss() -> None:
    """Set the peak to the resident bytes of now."""
    Path("/proc/self/clear_refs").write_text("5")


def trim_heap() -> None:
    """Give memory that was freed back to the system, so that one stage's leftovers are no other stage's peak."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocator or the operating system refused memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error)
    return isinstance(error, RuntimeError) and (
        any(refusal in text for refusal in _CPU_ALLOCATOR_ERRORS) or text.strip() == _ONEDNN_REFUSAL
    )


def load_service(path: str) -> type:
    """Import `package.module:Class` and return the class.

    Raises:
        ValueError: the path has no colon.
    """
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"service is {path!r}; write it as package.module:Class.")
    return getattr(importlib.import_module(module), name)


def run_worker(
    connection: socket.socket, settings: WorkerSettings, service: type, device: int, cores: list[int] | None
) -> None:
    """Be the worker of `device` until the driver says exit or is gone; never returns."""
    code = 1
    host_cores = frozenset(os.sched_getaffinity(0))
    try:
        _set_up_process(settings, device, cores)
        _Worker(MessageStream(connection), settings, service, device, host_cores).run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the nursery's exit handlers aren't ours


class _Worker:
    """The threads of a worker around one service."""

    def __init__(
        self,
        stream: MessageStream,
        settings: WorkerSettings,
        service: type,
        device: int,
        host_cores: frozenset[int],
    ) -> None:
        self._stream = stream
        self._settings = settings
        self._service_class = service
        self._device = device
        self._host_cores = host_cores
        self._abort = threading.Event()
        self._finished = threading.Event()
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._beside: queue.SimpleQueue[tuple[object, _Command]] = queue.SimpleQueue()
        self._service: object = None
        self._spending = Spending()

    def run(self) -> None:
        """Make the service, then run commands until told to exit."""
        others = (self._receive, self._beat, self._pass_on_notices, *[self._run_beside] * _BESIDE_THREADS)
        for target in others:  # before the cap: their stacks don't count
            threading.Thread(target=target, daemon=True).start()
        try:
            service = self._service = self._service_class(self._make_context())
        except Exception as error:
            self._stream.send(("failed", 0, _describe_error(error)))
            return
        self._stream.send(("ready", os.getpid()))
        while (command := self._commands.get()) is not None:
            self._run_command(service, *command, spending=self._spending)
            del command
            trim_heap()
        if callable(close := getattr(service, "close", None)):
            close()
        self._finished.set()

    def _make_context(self) -> WorkerContext:
        on_cuda = self._settings.device_type == "cuda"
        torch_device = torch.device("cuda", self._device) if on_cuda else torch.device(self._settings.device_type)
        if on_cuda:
            torch.cuda.set_device(torch_device)
        if not on_cuda:
            trim_heap()  # what the nursery had freed is no memory of this worker
            reset_peak_rss()
        context = WorkerContext(
            self._device,
            torch_device,
            self._settings.store_address,
            self._abort,
            self._settings.threads,
            self._host_cores,
            self._spending,
        )
        if self._settings.memory_bytes is not None and not on_cuda:
            allowance = context.stacks_bytes + int(HEAP_ALLOWANCE * self._settings.memory_bytes)
            limit = context.baseline_data_bytes + allowance
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return context

    def _run_command(
        self, service: object, number: int, method: str, kwargs: dict[str, Any], *, spending: Spending | None = None
    ) -> None:
        """Run a command and send what came of it, with what it has spent, unless it runs beside others."""
        begun = time.perf_counter()
        try:
            result = getattr(service, method)(**kwargs)
            times = spending.take(time.perf_counter() - begun) if spending is not None else None
            self._stream.send(("result", number, result, times))
        except Exception as error:  # also of a result that can't be pickled: that fails before anything is sent
            if spending is not None:
                spending.take(0.0)
            self._stream.send(("failed", number, _describe_error(error)))

    def _run_beside(self) -> None:
        """Run the commands that go beside the others, on whatever core has time."""
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _BESIDE_NICENESS)
        while True:
            service, command = self._beside.get()
            with contextlib.suppress(OSError):  # the driver pins all threads whenever workers come or go
                os.sched_setaffinity(0, self._host_cores)
            try:
                self._run_command(service, *command)
            except OSError:  # the driver is gone
                os._exit(1)
            except BaseException:  # not even the failure could be told: whoever waits for an answer would for ever
                traceback.print_exc()
                os._exit(1)
            del command

    def _receive(self) -> None:
        """Take the driver's messages; its end of file ends this process, whatever it does."""
        try:
            while True:
                kind, *rest = self._stream.receive()
                if kind == "command":
                    self._commands.put((rest[0], rest[1], rest[2]))
                elif kind == "beside":
                    self._beside.put((self._service, (rest[0], rest[1], rest[2])))
                elif kind == "abort":
                    self._abort.set()
                elif kind == "clear":  # no command is under way; the answer tells that this process isn't stopped
                    self._abort.clear()
                    self._stream.send(("result", rest[0], None, None))
                elif kind == "exit":
                    break
        except EOFError:
            os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        self._abort.set()
        self._commands.put(None)
        if not self._finished.wait(_EXIT_GRACE_S):
            os._exit(0)

    def _pass_on_notices(self) -> None:
        """Tell the driver of each SIGTERM: the device will go. All other threads, born with it blocked, go on."""
        with contextlib.suppress(OSError):  # the driver is gone; the thread that receives ends this process
            while True:
                signal.sigwait({signal.SIGTERM})
                self._stream.send(("notice",))

    def _beat(self) -> None:
        """Tell the driver that this process runs; end with the nursery, should the socket outlive the driver.

        End as well when a thread can't begin: whoever has started it would hang.
        """
        nursery, beats_to_begin = os.getppid(), Counter[threading.Thread]()
        while os.getppid() == nursery:
            beginning = set(_threads_about_to_begin())
            beats_to_begin = Counter({thread: beats_to_begin[thread] + 1 for thread in beginning})
            if any(beats > _MOST_BEATS_TO_BEGIN for beats in beats_to_begin.values()):
                sys.stderr.write("a thread could not begin, for want of memory most likely; this process ends\n")
                break
            try:
                self._stream.send(("beat", rss_bytes()))
            except OSError:
                break
            time.sleep(self._settings.heartbeat_s)
        os._exit(1)


def _threads_about_to_begin() -> list[threading.Thread]:
    return list(getattr(threading, "_limbo", {}).values())


def _set_up_process(settings: WorkerSettings, device: int, cores: list[int] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal group; the driver decides
    if settings.log_dir is not None:
        log = os.open(f"{settings.log_dir}/device-{device}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    if cores is not None:
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(settings.threads)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def _describe_error(error: Exception) -> dict[str, Any]:
    """Return what `CommandFailed` is made of."""
    chain, link = [], error
    while isinstance(link, BaseException) and link not in chain:
        chain.append(link)
        link = link.__cause__  # type: ignore[assignment]
    return {
        "error_type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "out_of_memory": any(is_out_of_memory(part) for part in chain),
        "consequence": any(isinstance(part, CommunicatorError) for part in chain),
    }


def _read_status_bytes(key: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    raise KeyError(key)
