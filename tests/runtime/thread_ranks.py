"""Ranks as threads of one process, for tests of code that only needs a communicator's interface."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WAIT_S = 30  # a test that hangs fails with queue.Empty or BrokenBarrierError instead


class _Sent:
    """A send that is done when the receiver has taken it: the strictest of what a real transport may do."""

    def __init__(self) -> None:
        self.taken = threading.Event()

    def wait(self) -> None:
        assert self.taken.wait(WAIT_S), "a message was never received"


class _Received:
    def __init__(self, box: queue.Queue, out: Tensor) -> None:
        self.box, self.out = box, out

    def wait(self) -> None:
        tensor, sent = self.box.get(timeout=WAIT_S)
        self.out.copy_(tensor)
        sent.taken.set()


class ThreadGroup:
    """State shared by the ranks of one group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=WAIT_S)
        self.parts: list[Any] = [None] * size
        self.boxes: dict[tuple[int, int, int], queue.Queue] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.messages = 0

    def box(self, source: int, target: int, tag: int) -> queue.Queue:
        with self.lock:
            return self.boxes[source, target, tag]


class ThreadRank:
    """One rank's communicator."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.group, self.rank, self.size = group, rank, group.size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        assert tensor.is_contiguous()
        self.group.parts[self.rank] = tensor.detach().clone()
        self.group.barrier.wait()
        parts = list(self.group.parts)
        self.group.barrier.wait()
        return parts

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        parts = torch.stack(self.all_gather(tensor))
        with torch.no_grad():
            tensor.copy_(parts.sum(0) if op == "sum" else parts.amax(0))

    def send(self, tensor: Tensor, peer: int, tag: int = 0) -> _Sent:
        assert tensor.is_contiguous()
        sent = _Sent()
        with self.group.lock:
            self.group.messages += 1
        self.group.box(self.rank, peer, tag).put((tensor, sent))
        return sent

    def recv(self, tensor: Tensor, peer: int, tag: int = 0) -> _Received:
        return _Received(self.group.box(peer, self.rank, tag), tensor)


def run_ranks(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body(rank)` on one thread a rank and return the results; the first exception is raised again."""
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def run_group(size: int, work: Callable[[ThreadRank], Any]) -> list[Any]:
    """Run `work` on one thread a rank of one group; a rank that fails leaves none of the others waiting."""
    group = ThreadGroup(size)

    def body(rank: int) -> Any:
        try:
            return work(ThreadRank(group, rank))
        except BaseException:
            group.barrier.abort()
            raise

    return run_ranks(size, body)
