"""Reward functions in Python: loading them, and running them in processes that may fail without harm.

    score() --JSON over a socket--> worker, one request at a time --> f(prompt, response, example)

A worker is this file run as a script: it imports the function's module and the standard library only, never the
main module of the run. A worker that doesn't answer in time is killed with all its children; a worker whose driver
is gone kills itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

RewardFunction = Callable[[str, str, dict[str, Any]], float]

START_LIMIT_S = 60.0  # a reward function's module may import a lot
MAX_CAUSE_CHARS = 500
HEADER = struct.Struct(">I")


class RewardError(RuntimeError):
    """A reward function failed on a sample; the message names the sample, its prompt and the cause."""


@dataclass(frozen=True)
class RewardRequest:
    """One response to be scored.

    Attributes:
        sample_id: counts over the whole run.
        prompt: text of the prompt.
        response: text of the response.
        example: the other keys of the prompt's line; JSON values.
    """

    sample_id: int
    prompt: str
    response: str
    example: dict[str, Any]


def load_reward_function(spec: str) -> RewardFunction:
    """Return the function that "package.module:name" or "file.py:name" (relative to the current directory) names.

    The current directory, or the file's, is searched for imports too, after everything else, from then on.

    Raises:
        ValueError: the spec is malformed, or its module, its name or its kind is wrong.
    """
    target, colon, name = spec.rpartition(":")
    if not colon or not target or not name:
        raise ValueError(f'reward.function is "{spec}"; write "package.module:name" or "file.py:name".')
    try:
        module = _load_file(Path(target)) if target.endswith(".py") else _load_module(target)
    except (Exception, SystemExit) as error:
        raise ValueError(
            f'reward.function is "{spec}", but {target} can\'t be imported ({type(error).__name__}: {error}); '
            f"name an installed module or a file seen from {os.getcwd()}."
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no" if function is None else "holds no function"
        raise ValueError(f'reward.function is "{spec}", but {target} {what} "{name}"; name a function defined there.')
    return function


def _load_file(path: Path) -> ModuleType:
    path = path.absolute()
    spec = importlib.util.spec_from_file_location(f"nereus_reward_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and typing look modules up by name
    _search(str(path.parent))
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    _search(os.getcwd())
    return importlib.import_module(name)


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)


@dataclass
class _Worker:
    """A subprocess that scores one request at a time."""

    process: subprocess.Popen[bytes]
    sock: socket.socket
    deadline: float = field(default=math.inf)
    index: int | None = None  # of the request in work; None while it loads the function
    killed: bool = False

    def kill(self) -> None:
        """End the process and all it started, and reap it; only the first call does anything."""
        if self.killed:  # its number may be another process's by now
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.killed = True


class RewardPool:
    """Scores responses with a reward function in a few worker processes; a context manager.

    On any failure all workers are killed and reaped; a later `score` starts fresh ones. `close` is final, and may be
    called from any thread: a `score` at work in another one ends with a RewardError.

    Args:
        spec: as for `load_reward_function`.
        num_workers: processes.
        timeout_s: limit for one sample.
    """

    def __init__(self, spec: str, *, num_workers: int = 1, timeout_s: float = 10.0) -> None:
        assert num_workers >= 1 and timeout_s > 0, (num_workers, timeout_s)
        self.spec = spec
        self.num_workers = num_workers
        self.timeout_s = timeout_s
        self._workers: list[_Worker] = []
        self._closed = False
        self._lock = threading.Lock()  # of the two above; workers are started and killed under it
        self._scoring = threading.Lock()  # held by who reads and writes the workers' sockets

    def __enter__(self) -> RewardPool:
        with self._scoring:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill and reap all workers and start no more; may be called twice, and by several threads."""
        with self._lock:
            self._closed = True
            for worker in self._workers:
                worker.kill()  # whoever waits for its answer sees the end of the stream
        with self._scoring:
            self._reset()

    def _reset(self) -> None:
        """Kill and reap all workers; the caller holds `_scoring`, so that nobody uses a socket that is closed here."""
        with self._lock:
            while self._workers:
                worker = self._workers[-1]
                worker.kill()
                worker.sock.close()
                self._workers.pop()

    def score(self, requests: Sequence[RewardRequest]) -> list[float]:
        """Return the function's value for each request, in their order.

        Raises:
            RewardError: the function raised, returned no finite number, took longer than `timeout_s` or ended its
                process. The first failure seen is the one reported. Or the pool was closed.
        """
        with self._scoring:
            try:
                if not self._workers or self._closed:
                    self._start()
                return self._score(requests)
            except BaseException as error:
                self._reset()  # whatever is still in work must not answer a later call
                if self._closed and isinstance(error, RewardError):
                    raise self._refusal() from error
                raise

    def _score(self, requests: Sequence[RewardRequest]) -> list[float]:
        rewards: list[float] = [math.nan] * len(requests)
        waiting = list(range(len(requests)))[::-1]
        for worker in self._workers:
            if worker.deadline == math.inf:
                self._assign(worker, requests, waiting)
        while busy := [worker for worker in self._workers if worker.deadline < math.inf]:
            if not waiting and all(worker.index is None for worker in busy):
                break  # workers that are still loading have nothing left to do
            limit = max(min(worker.deadline for worker in busy) - time.monotonic(), 0.0)
            ready = set(wait([worker.sock for worker in busy], limit))
            for worker in busy:
                request = None if worker.index is None else requests[worker.index]
                if worker.sock in ready:
                    answer = self._receive(worker, request)
                    if worker.index is not None:
                        rewards[worker.index] = answer["reward"]
                    self._assign(worker, requests, waiting)
                elif time.monotonic() >= worker.deadline:
                    limit_s = START_LIMIT_S if request is None else self.timeout_s
                    raise self._error(request, f"no answer within the limit of {limit_s:g} s")
        return rewards

    def _assign(self, worker: _Worker, requests: Sequence[RewardRequest], waiting: list[int]) -> None:
        worker.index, worker.deadline = None, math.inf
        if not waiting:
            return
        worker.index = waiting.pop()
        worker.deadline = time.monotonic() + self.timeout_s
        request = requests[worker.index]
        message = {"prompt": request.prompt, "response": request.response, "example": request.example}
        try:
            _send(worker.sock, message)
        except TimeoutError as error:
            raise self._error(request, f"its process took no request for {self.timeout_s:g} s") from error
        except OSError as error:
            raise self._error(request, self._explain_end(worker)) from error

    def _receive(self, worker: _Worker, request: RewardRequest | None) -> dict[str, Any]:
        try:
            answer = _read(worker.sock)
        except OSError as error:
            raise self._error(request, f"its answer broke off ({error})") from error
        if answer is None:
            raise self._error(request, self._explain_end(worker))
        if "error" in answer:
            raise self._error(request, answer["error"])
        return answer

    def _explain_end(self, worker: _Worker) -> str:
        try:
            code = worker.process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection to the run"
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"

    def _error(self, request: RewardRequest | None, cause: str) -> RewardError:
        if request is None:
            return RewardError(f"Reward function {self.spec} could not be started in its process: {cause}.")
        excerpt = request.prompt if len(request.prompt) <= 80 else request.prompt[:77] + "..."
        return RewardError(f"Reward function {self.spec} failed on sample {request.sample_id}, {excerpt!r}: {cause}.")

    def _start(self) -> None:
        try:
            for _ in range(self.num_workers):
                with self._lock:
                    if self._closed:
                        raise self._refusal()
                    self._workers.append(self._spawn())
            for worker in self._workers:
                self._greet(worker)
        except BaseException:
            self._reset()
            raise

    def _greet(self, worker: _Worker) -> None:
        try:
            _send(worker.sock, {"spec": self.spec, "path": sys.path})
        except TimeoutError as error:
            raise self._error(None, f"its process took no message for {self.timeout_s:g} s") from error
        except OSError as error:
            raise self._error(None, self._explain_end(worker)) from error

    def _refusal(self) -> RewardError:
        return RewardError(f"Reward function {self.spec} scores no more: its processes were ended with the run.")

    def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        ours.settimeout(self.timeout_s)  # a worker that was stopped doesn't read
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]  # -P: this folder holds modules of other names
        # One thread each: the devices' workers own the cores.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        # A session of its own: one signal ends what the function started too, and Ctrl-C reaches the driver only.
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,
            )
        return _Worker(process, ours, deadline=time.monotonic() + START_LIMIT_S)


def _send(sock: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    sock.sendall(HEADER.pack(len(data)) + data)


def _read(sock: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None if the other side is gone."""
    header = _read_exactly(sock, HEADER.size)
    body = _read_exactly(sock, HEADER.unpack(header)[0]) if header else None
    return None if body is None else json.loads(body)


def _read_exactly(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        try:
            chunk = sock.recv(count - len(data))
        except ConnectionResetError:
            return None
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def _serve(sock: socket.socket) -> None:
    """Load the function, then answer requests until the driver hangs up."""
    hello = _read(sock)
    if hello is None:
        return
    sys.path[:] = hello["path"]  # what the driver can import, the worker can
    try:
        function = load_reward_function(hello["spec"])
    except ValueError as error:
        _send(sock, {"error": str(error)})
        return
    _send(sock, {"ready": True})
    while (request := _read(sock)) is not None:
        _send(sock, _answer(function, request))


def _answer(function: RewardFunction, request: dict[str, Any]) -> dict[str, Any]:
    try:
        value: object = function(request["prompt"], request["response"], request["example"])
    except BaseException as error:  # SystemExit too: the driver must learn why
        frame = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})"
        return {"error": f"it raised {cause}"[:MAX_CAUSE_CHARS]}
    # numpy and torch scalars count as numbers; a text such as "1.0" doesn't.
    try:
        reward = float(value) if hasattr(type(value), "__float__") else None  # type: ignore[arg-type]
    except Exception:
        reward = None
    if reward is None or not math.isfinite(reward):
        return {"error": f"it returned {value!r:.100}, which is not a finite number"}
    return {"reward": reward}


def _die_with_driver(sock: socket.socket) -> None:
    """Wait until the driver's end of the socket is closed, then kill this process's group."""
    poll = select.poll()
    poll.register(sock.fileno(), 0)  # hang-up is reported unasked
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve as a worker on the socket whose descriptor is the only argument."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    # What the function prints goes to the log at once, not to a --json document on stdout.
    sys.stdout = sys.stderr
    os.dup2(2, 1)
    threading.Thread(target=_die_with_driver, args=(sock,), daemon=True).start()
    _serve(sock)


if __name__ == "__main__":
    main()
