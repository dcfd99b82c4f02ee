"""The interface behind which worker processes live, and the one way to run a command on several of them.

An engine has one worker process a device. A command names a method of the service inside the workers and the devices
it runs on; it takes all of them at once, so commands on overlapping devices can't deadlock. When one of its workers
fails, the others would wait for it in a communicator: `run_command` finds the root cause, frees the rest and raises.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from nereus.runtime.command_times import CommandTimes

# Peers of a dead worker see a closed connection some milliseconds before its exit is reported.
_ROOT_CAUSE_GRACE_S = 3.0


class WorkerLost(RuntimeError):
    """The worker of a device ended or hung; `reason` reads like "exited with signal 9 (SIGKILL)"."""

    def __init__(self, device: int, reason: str, *, out_of_memory: bool = False) -> None:
        super().__init__(f"device {device} was lost ({reason})")
        self.device = device
        self.reason = reason
        self.out_of_memory = out_of_memory


class CommandFailed(RuntimeError):
    """A command raised in the worker of a device; the worker lives on.

    Attributes:
        error_type: the exception's class name.
        message: its text.
        traceback: the worker's formatted traceback.
        out_of_memory: the allocator (or the operating system) refused memory.
        consequence: the error only says that a peer was gone or that the command was aborted.
    """

    def __init__(
        self,
        device: int,
        error_type: str,
        message: str,
        traceback: str,
        *,
        out_of_memory: bool = False,
        consequence: bool = False,
    ) -> None:
        super().__init__(f"device {device} failed: {error_type}: {message}")
        self.device = device
        self.error_type = error_type
        self.message = message
        self.traceback = traceback
        self.out_of_memory = out_of_memory
        self.consequence = consequence


class CommandError(RuntimeError):
    """What callers of `run_command` see: one sentence with device, label and step; the root cause is `__cause__`."""

    def __init__(
        self,
        message: str,
        *,
        label: str,
        device: int | None = None,
        step: int | None = None,
        out_of_memory: bool = False,
    ) -> None:
        super().__init__(message)
        self.device = device
        self.label = label
        self.step = step
        self.out_of_memory = out_of_memory


class Answer(Future):
    """The future of a command; before it ends with a result, `times` says what the worker has spent on it."""

    times: CommandTimes | None = None


class Engine(ABC):
    """One worker process a device; a context manager, so that every way out frees the workers.

    Attributes:
        store_address: host and port of a TCPStore that lives in the driver as long as the engine.
        broken: why no further command is accepted, or None.
        generation: how often the engine has recovered; a command of an earlier one neither runs nor breaks anything.
        quarantined: devices whose workers died too often; they get no other one.
    """

    store_address: tuple[str, int]

    def __init__(self) -> None:
        self.broken: str | None = None
        self.generation = 0
        self.quarantined: set[int] = set()
        self._recovered_from = ""  # why the generation before this one broke
        self._locks: dict[int, threading.Lock] = {}
        self._state_lock = threading.Lock()
        self._break_lock = threading.RLock()  # a signal handler may interrupt the very thread that holds it

    @abstractmethod
    def start(self, device_ids: Sequence[int]) -> None:
        """Start the workers of these devices and wait until each has made its service."""

    @abstractmethod
    def release(self, device_ids: Collection[int]) -> None:
        """Stop the workers of these devices; the others go on."""

    @abstractmethod
    def submit(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Send one command; the future ends with its result, `CommandFailed` or `WorkerLost`."""

    @abstractmethod
    def submit_beside(self, device: int, method: str, /, **kwargs: Any) -> Future:
        """Send one command that runs beside the others, in a thread of its own: some at the same time, in no order.

        It takes no lock and is no part of a step, so it may use no communicator. An engine that is broken takes it
        as well: what a failed step leaves to be done is still done.
        """

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Return the process id of each device's worker."""

    @abstractmethod
    def abort(self) -> None:
        """Set the abort flag in all workers: every wait of a communicator raises."""

    @abstractmethod
    def close(self) -> None:
        """Stop all workers and free everything; may be called twice."""

    @abstractmethod
    def recover(self, timeout_s: float = 10.0, *, step: int | None = None, may_shrink: bool = False) -> tuple[int, ...]:
        """Make a broken engine take commands again, and return the devices whose workers were restarted.

        No command is in flight afterwards, no abort flag set, no device locked. Restarted workers have new, empty
        services; those of the others are as the failed commands have left them. A worker waits longer for each restart.

        Args:
            timeout_s: a worker that doesn't end its command within this time is killed, and restarted.
            step: the PPO step in which the workers have died; three deaths of a device within ten steps are too many.
            may_shrink: go on without the devices that are lost too often; they are in `quarantined` then.

        Raises:
            CommandError: a device is lost too often, or can't be restarted; the engine stays broken.
        """

    def notices(self) -> frozenset[int]:
        """Return the devices that will go: their worker got SIGTERM since it was started."""
        return frozenset()

    def mark_broken(self, reason: str, generation: int | None = None) -> None:
        """Refuse all further commands and wake every worker that waits for a peer.

        Args:
            reason: what the commands that are refused say.
            generation: the one that the failure belongs to, if not the present one; what is past breaks nothing.
        """
        with self._break_lock:  # until the workers are told: who recovers must not be overtaken by it
            if self.broken is not None or generation not in (None, self.generation):
                return
            self.broken = reason
            self.abort()

    def why_refused(self, generation: int) -> str | None:
        """Return why a command that was given in a generation is refused, or None."""
        with self._break_lock:
            return self._recovered_from if generation != self.generation else self.broken

    @contextmanager
    def devices_locked(self, device_ids: Collection[int], timeout_s: float | None = None) -> Iterator[None]:
        """Hold these devices for one command; taken in ascending order, so that holders can't wait in a circle.

        Raises:
            TimeoutError: another command has held one of them for `timeout_s`.
        """
        with self._state_lock:
            locks = [(device, self._locks.setdefault(device, threading.Lock())) for device in sorted(device_ids)]
        with ExitStack() as stack:
            for device, lock in locks:
                if not lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
                    raise TimeoutError(f"device {device} is still held by a command")
                stack.callback(lock.release)
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def run_command(
    engine: Engine,
    method: str,
    kwargs_by_device: Mapping[int, Mapping[str, Any]],
    *,
    label: str,
    step: int | None,
    timeout_s: float | None = None,
    on_times: Callable[[dict[int, CommandTimes]], None] | None = None,
) -> dict[int, Any]:
    """Run one method on several devices at the same time and return each device's result.

    Args:
        engine: holds the workers.
        method: name of a method of the workers' service.
        kwargs_by_device: the method's arguments for each device that takes part.
        label: what the command does, for messages; a model-stage such as "actor.training".
        step: the PPO step it belongs to, if any.
        timeout_s: seconds after which the command counts as failed; None waits for as long as the workers are alive.
        on_times: called with what each device has spent, once all have ended well.

    Raises:
        CommandError: a worker failed or was lost, or time ran out; the engine is broken until it recovers.
    """
    where = label if step is None else f"{label}, step {step}"
    generation = engine.generation
    with engine.devices_locked(kwargs_by_device.keys()):
        if (broken := engine.why_refused(generation)) is not None:
            raise CommandError(broken, label=label, step=step)  # the root cause, not what follows from it
        try:
            futures = {device: engine.submit(device, method, **kwargs) for device, kwargs in kwargs_by_device.items()}
            done, pending = wait(futures.values(), timeout=timeout_s, return_when=FIRST_EXCEPTION)
            if not pending and not any(future.exception() for future in done):
                if on_times is not None:
                    on_times(_times_of(futures))
                return {device: future.result() for device, future in futures.items()}
            cause = _find_root_cause(engine, futures)
        except BaseException:
            engine.mark_broken(f"{where} was interrupted", generation)  # no worker stays blocked behind a Ctrl-C
            raise
        error = _describe_failure(cause, futures, where, label, step, timeout_s)
        earlier = engine.broken
        engine.mark_broken(str(error), generation)
        if earlier is not None and cause is not None and _is_consequence(cause):
            raise CommandError(earlier, label=label, step=step) from cause
        raise error from cause


def _times_of(futures: Mapping[int, Future]) -> dict[int, CommandTimes]:
    answers = {device: future for device, future in futures.items() if isinstance(future, Answer)}
    return {device: answer.times for device, answer in answers.items() if answer.times is not None}


def _find_root_cause(engine: Engine, futures: Mapping[int, Future]) -> WorkerLost | CommandFailed | None:
    """Return the failure that explains the others, or None where there is none yet.

    A lost worker wins over everything, an error of a worker's own over errors about peers; for either to be reported
    it waits some seconds, since peers may notice a death before the driver does.
    """
    deadline = time.monotonic() + _ROOT_CAUSE_GRACE_S
    while True:
        failures = [error for device in sorted(futures) if (error := _failure_of(futures[device])) is not None]
        if not failures:
            return None
        failures.sort(key=lambda error: (not isinstance(error, WorkerLost), _is_consequence(error)))
        pending = [future for future in futures.values() if not future.done()]
        finished = not pending or engine.broken is not None or time.monotonic() > deadline
        if finished or not _is_consequence(failures[0]):
            return failures[0]
        wait(pending, timeout=0.05, return_when=FIRST_EXCEPTION)


def _failure_of(future: Future) -> WorkerLost | CommandFailed | None:
    error = future.exception() if future.done() else None
    assert error is None or isinstance(error, WorkerLost | CommandFailed), f"engine failed with {error!r}"
    return error


def _is_consequence(error: WorkerLost | CommandFailed) -> bool:
    return isinstance(error, CommandFailed) and error.consequence


def _describe_failure(
    cause: WorkerLost | CommandFailed | None,
    futures: Mapping[int, Future],
    where: str,
    label: str,
    step: int | None,
    timeout_s: float | None,
) -> CommandError:
    if cause is None:
        late = ", ".join(str(device) for device, future in sorted(futures.items()) if not future.done())
        return CommandError(f"{where} did not finish within {timeout_s:g} s on device {late}", label=label, step=step)
    if isinstance(cause, WorkerLost):
        text = f"device {cause.device} was lost ({cause.reason}) during {where}"
    else:
        first_line = cause.message.strip().partition("\n")[0]
        verb = "ran out of memory" if cause.out_of_memory else "failed"
        text = f"device {cause.device} {verb} during {where}: {cause.error_type}: {first_line}"
    return CommandError(text, device=cause.device, label=label, step=step, out_of_memory=cause.out_of_memory)
