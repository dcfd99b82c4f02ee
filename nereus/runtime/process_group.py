"""Groups over torch.distributed's raw process groups: gloo between hosts, NCCL on CUDA; no global state.

gloo: only its send and receive are used, so that sums run in rank order and sizes may differ. They can't be polled,
and a wait that times out closes the connection, so a thread of the group's waits, and the caller looks after it now
and then. On an abort that thread stays behind until its sockets close; the caller goes on.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import distributed

from nereus.runtime.shared_reduce import reduce_in_rank_order
from nereus.runtime.waiting import CommunicatorError, PeerWatch, wait_until

CONNECT_TIMEOUT_S = 30.0
_WAIT_LIMIT = timedelta(days=1)
_DIRECT_BYTES = 64 << 10
_LOOK_UP_S = 0.02
# Tags below this are the collectives' own.
_FIRST_USER_TAG = 16
_DATA_TAG, _SIZE_TAG, _PART_TAG = 0, 1, 2


@lru_cache(maxsize=1)
def _gloo_device() -> object:
    """Return the one network device (and its event thread) that all groups of this process share."""
    return distributed.ProcessGroupGloo.create_default_device()


class GlooGroup:
    """One rank's end of a group of processes on several hosts, on the CPU."""

    def __init__(self, store: distributed.Store, rank: int, size: int, watch: PeerWatch) -> None:
        options: Any = distributed.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [_gloo_device()]
        options._timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        self._group: Any = distributed.ProcessGroupGloo(store, rank, size, options)
        self._rank = rank
        self._size = size
        self._watch = watch
        self._peers = [peer for peer in range(size) if peer != rank]
        self._waiter: _Waiter | None = None

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_reduce(torch.zeros(1), "sum")

    def all_reduce(self, flat: torch.Tensor, op: str) -> None:
        """Reduce a flat contiguous tensor in place, in rank order; bitwise equal on all ranks."""
        if flat.numel() * flat.element_size() <= _DIRECT_BYTES:
            parts = self._exchange(dict.fromkeys(self._peers, flat), {peer: flat.numel() for peer in self._peers}, flat)
            parts[self._rank] = flat.clone()
            reduce_in_rank_order([parts[rank] for rank in range(self._size)], op, flat)
            return
        bounds = [flat.numel() * part // self._size for part in range(self._size + 1)]
        pieces = [flat[bounds[rank] : bounds[rank + 1]] for rank in range(self._size)]
        own = pieces[self._rank]
        parts = self._exchange(
            {peer: pieces[peer] for peer in self._peers}, {peer: own.numel() for peer in self._peers}, flat
        )
        parts[self._rank] = own.clone()
        reduce_in_rank_order([parts[rank] for rank in range(self._size)], op, own)
        sends = [self.send(own, peer, _PART_TAG - _FIRST_USER_TAG) for peer in self._peers]
        receives = [self.recv(pieces[peer], peer, _PART_TAG - _FIRST_USER_TAG) for peer in self._peers]
        for wait in (*receives, *sends):
            wait()

    def broadcast(self, flat: torch.Tensor, src: int) -> None:
        """Copy the flat contiguous tensor of rank `src` into that of every rank."""
        if self._rank == src:
            waits = [self.send(flat, peer, _DATA_TAG - _FIRST_USER_TAG) for peer in self._peers]
        else:
            waits = [self.recv(flat, src, _DATA_TAG - _FIRST_USER_TAG)]
        for wait in waits:
            wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous tensors of all ranks; they may differ in size along dim 0."""
        row_shape = tensor.shape[1:]
        own_rows = torch.tensor([tensor.shape[0] if tensor.dim() else 1])
        all_rows = self._exchange(
            dict.fromkeys(self._peers, own_rows), dict.fromkeys(self._peers, 1), own_rows, tag=_SIZE_TAG
        )
        rows = {peer: int(count) for peer, count in all_rows.items()}
        flat = tensor.view(-1)
        counts = {peer: count * row_shape.numel() for peer, count in rows.items()}
        parts = self._exchange(dict.fromkeys(self._peers, flat), counts, flat)
        shapes = {peer: (count, *row_shape) if tensor.dim() else () for peer, count in rows.items()}
        return [tensor.clone() if rank == self._rank else parts[rank].view(shapes[rank]) for rank in range(self._size)]

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Callable[[], None]:
        """Start to send a contiguous tensor; the returned function waits for it."""
        if not tensor.numel():
            return _nothing
        assert self._group is not None, "the communicator is closed"
        work = self._group.send([tensor], dst, tag + _FIRST_USER_TAG)
        return lambda: self._wait(work, dst, "send", tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Callable[[], None]:
        """Start to receive into a contiguous tensor; the returned function waits for it."""
        if not tensor.numel():
            return _nothing
        assert self._group is not None, "the communicator is closed"
        work = self._group.recv([tensor], src, tag + _FIRST_USER_TAG)
        return lambda: self._wait(work, src, "recv", tag)

    def close(self) -> None:
        """Drop the group: its sockets close and peers that wait for this rank raise."""
        self._group = None
        if self._waiter is not None:
            self._waiter.end()
            self._waiter = None

    def _exchange(
        self, sent: dict[int, torch.Tensor], counts: dict[int, int], like: torch.Tensor, tag: int = _DATA_TAG
    ) -> dict[int, torch.Tensor]:
        """Send one tensor to each peer and receive one flat tensor of `counts[peer]` elements from each."""
        received = {peer: like.new_empty(counts[peer]) for peer in self._peers}
        waits = [self.recv(received[peer], peer, tag - _FIRST_USER_TAG) for peer in self._peers]
        waits += [self.send(sent[peer], peer, tag - _FIRST_USER_TAG) for peer in self._peers]
        for wait in waits:
            wait()
        return received

    def _wait(self, work: distributed.Work, peer: int, operation: str, tag: int) -> None:
        if self._waiter is None:
            self._waiter = _Waiter()
        ended = self._waiter.wait(work)
        wait_until(
            lambda: ended.is_over.wait(_LOOK_UP_S),  # asleep: gloo's own thread may be on the same core
            self._watch,
            lambda: f"rank {self._rank} waits for rank {peer} ({_name_transfer(operation, tag)})",
        )
        if ended.failure is not None:
            raise CommunicatorError(f"the connection to rank {peer} was lost: {ended.failure}") from ended.failure


class _Ended:
    """Whether a transfer is over, and how it failed if it did."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.failure: Exception | None = None


class _Waiter:
    """A thread that waits for one transfer after the other."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[tuple[distributed.Work, _Ended] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def wait(self, work: distributed.Work) -> _Ended:
        """Return what tells when a transfer is over."""
        ended = _Ended()
        self._works.put((work, ended))
        return ended

    def end(self) -> None:
        """Let the thread end once nothing is left to wait for."""
        self._works.put(None)

    def _run(self) -> None:
        while (given := self._works.get()) is not None:
            work, ended = given
            try:
                work.wait(_WAIT_LIMIT)
            except Exception as error:  # whatever it is, who waits must hear of it
                ended.failure = error
            ended.is_over.set()
            del given, work, ended  # it must not hold what keeps sockets open


class NcclGroup:
    """One rank's end of a group of CUDA devices; waits are for the current stream, an abort tears the group down."""

    def __init__(self, store: distributed.Store, rank: int, size: int, device: torch.device, watch: PeerWatch) -> None:
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = timedelta(minutes=10)
        self._group: Any = distributed.ProcessGroupNCCL(store, rank, size, options)
        self._group.eager_connect_single_device(device)
        self._device = device
        self._rank = rank
        self._size = size
        self._watch = watch
        self._closed = threading.Event()
        threading.Thread(target=self._abort_with_flag, daemon=True).start()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_reduce(torch.zeros(1, device=self._device), "sum")
        torch.cuda.current_stream(self._device).synchronize()

    def all_reduce(self, flat: torch.Tensor, op: str) -> None:
        """Reduce a flat contiguous tensor in place; the order is NCCL's, the same for the same group and size."""
        options: Any = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.SUM if op == "sum" else distributed.ReduceOp.MAX
        self._live().allreduce([flat], options).wait()

    def broadcast(self, flat: torch.Tensor, src: int) -> None:
        """Copy the flat contiguous tensor of rank `src` into that of every rank."""
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._live().broadcast([flat], options).wait()

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous tensors of all ranks; they may differ in size along dim 0 (padded on the way)."""
        rows = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self._size)]
        own_rows = torch.tensor([tensor.shape[0] if tensor.dim() else 1], device=self._device)
        self._live().allgather([rows], [own_rows]).wait()
        counts = [int(row) for row in rows]
        row_shape = tensor.shape[1:]
        padded = tensor.new_zeros(max(counts), *row_shape)
        padded[: int(own_rows)] = tensor
        parts = [torch.empty_like(padded) for _ in counts]
        self._live().allgather([parts], [padded]).wait()
        return [part[:count] if tensor.dim() else part[0] for part, count in zip(parts, counts, strict=True)]

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Callable[[], None]:
        """Start to send a contiguous tensor; NCCL has no tags: messages of a pair match in order."""
        return self._live().send([tensor], dst, tag).wait

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Callable[[], None]:
        """Start to receive into a contiguous tensor; see `send` about tags."""
        return self._live().recv([tensor], src, tag).wait

    def close(self) -> None:
        """Tear the group down; kernels that wait for a peer end."""
        self._closed.set()
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _live(self) -> Any:
        if self._group is None:
            self._watch.check()
            raise CommunicatorError("the communicator is closed")
        return self._group

    def _abort_with_flag(self) -> None:
        while not self._closed.wait(0.05):
            if self._watch.abort.is_set():
                self.close()


def _name_transfer(operation: str, tag: int) -> str:
    """Return what a transfer is for: a user's message by its tag, or a part of a collective."""
    return f"{operation} with tag {tag}" if tag >= 0 else f"{operation} of a collective"


def _nothing() -> None:
    """Wait for a message without elements."""
