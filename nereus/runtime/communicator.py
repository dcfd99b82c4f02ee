"""Communication inside one group of ranks: the only door to shared memory, gloo and NCCL.

A communicator is made per group and per epoch from a store in the driver, in running processes. No wait ever hangs:
each polls the abort flag, and on one host also whether the peers are alive, and ends after some minutes.

| ranks | way | order of sums |
|---|---|---|
| one | nothing | - |
| CPU, one host, x86-64 | shared memory (`shared_reduce`, `mailbox`) | rank order |
| CPU otherwise | gloo's send and receive (`process_group`) | rank order |
| CUDA | NCCL (`process_group`) | NCCL's |
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import distributed

from nereus.runtime.command_times import Spending
from nereus.runtime.mailbox import Mailbox, mailbox_bytes
from nereus.runtime.process_group import GlooGroup, NcclGroup
from nereus.runtime.shared_reduce import SharedCollectives, SharedSegment, shared_memory_is_ordered
from nereus.runtime.waiting import AbortFlag, CommunicatorAborted, CommunicatorError, PeerWatch, wait_until

__all__ = ["AbortFlag", "Communicator", "CommunicatorAborted", "CommunicatorError", "Pending"]

_SHARED_MESSAGE_BYTES, _SHARED_WINDOW_BYTES = 4 << 20, 8 << 20
_MESSAGE_BYTES, _WINDOW_BYTES = 16 << 20, 32 << 20
_LONE_BYTES = 512 << 10


class Pending:
    """A transfer that was started; its tensor must be left alone until `wait` returns."""

    def __init__(self, wait: Callable[[], None], spent: Callable[[float], None] | None = None) -> None:
        """Begin with the function that waits, and one that is told the seconds that this took."""
        self._wait: Callable[[], None] | None = wait
        self._spent = spent

    def wait(self) -> None:
        """Return when the tensor may be used again; a second call does nothing.

        Raises:
            CommunicatorAborted: the abort flag was set.
            CommunicatorError: the peer is gone, or sent another number of bytes.
        """
        if self._wait is not None:
            begun = time.perf_counter()
            self._wait()
            self._wait = None
            if self._spent is not None:
                self._spent(time.perf_counter() - begun)


class _Group(Protocol):
    def barrier(self) -> None: ...
    def all_reduce(self, flat: torch.Tensor, op: str) -> None: ...
    def broadcast(self, flat: torch.Tensor, src: int) -> None: ...
    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...
    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Callable[[], None]: ...
    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Callable[[], None]: ...
    def close(self) -> None: ...


class Communicator:
    """One rank's end of a group; all ranks call the same collectives in the same order, from one thread each.

    Attributes:
        rank, size: this rank and the number of ranks.
    """

    def __init__(self, rank: int, size: int, group: _Group | None, watch: PeerWatch) -> None:
        assert (group is None) == (size == 1)
        self.rank = rank
        self.size = size
        self._group = group
        self._watch = watch
        self._buffers: list[torch.UntypedStorage] = []  # of packed messages that are over, where there is no mailbox
        self._spending: Spending | None = None
        self._class: str | None = None

    def count_into(self, spending: Spending, operation_class: str | None = None) -> None:
        """Count seconds and bytes from now on, under one operation class, or each operation's own."""
        self._spending, self._class = spending, operation_class

    @classmethod
    def connect(
        cls,
        *,
        store_address: tuple[str, int],
        name: str,
        epoch: int,
        rank: int,
        size: int,
        torch_device: torch.device,
        abort: AbortFlag,
        same_host: bool = True,
    ) -> "Communicator":
        """Join the group `name` as one of `size` ranks; returns when all have joined.

        Args:
            store_address: host and port of the driver's TCPStore.
            name: the group's name, the same on all its ranks.
            epoch: counts attempts; a pair of name and epoch is never used twice.
            rank: 0 <= rank < size.
            size: number of ranks.
            torch_device: where the tensors live.
            abort: ends every wait once set.
            same_host: all ranks run on one host and see each other's processes.

        Raises:
            CommunicatorAborted: the abort flag was set before all had joined.
            CommunicatorError: a rank didn't come, or ended meanwhile.
        """
        assert 0 <= rank < size, f"rank {rank} of {size}"
        watch = PeerWatch(abort)
        if size == 1:
            return cls(rank, size, None, watch)
        on_shared_memory = torch_device.type == "cpu" and same_host and shared_memory_is_ordered()
        # The other groups' constructors hold a client while they wait in it.
        client = _shared_client(store_address) if on_shared_memory else _new_client(store_address)
        store = distributed.PrefixStore(f"{name}/{epoch}", client)
        group: _Group
        try:
            if on_shared_memory:
                group = _SharedGroup(store, rank, size, watch)
            else:
                # Their constructors block without a look at the abort flag.
                _meet_in_store(store, rank, size, {}, watch)
                if torch_device.type == "cuda":
                    group = NcclGroup(store, rank, size, torch_device, watch)
                else:
                    group = GlooGroup(store, rank, size, watch)
        except BaseException:
            watch.close()
            raise
        return cls(rank, size, group, watch)

    @property
    def message_bytes(self) -> int:
        """The size of many messages that is quickest: on shared memory those in flight stay in the cache."""
        return _SHARED_MESSAGE_BYTES if isinstance(self._group, _SharedGroup) else _MESSAGE_BYTES

    @property
    def window_bytes(self) -> int:
        """How much of many messages may be under way to a peer: enough that it goes on while this rank must pause."""
        return _SHARED_WINDOW_BYTES if isinstance(self._group, _SharedGroup) else _WINDOW_BYTES

    @property
    def lone_bytes(self) -> int:
        """From what size on a tensor is best a message of its own: then it needs no copy on its way to a socket."""
        return self.message_bytes if isinstance(self._group, _SharedGroup) else _LONE_BYTES

    def all_reduce(self, tensor: torch.Tensor, op: Literal["sum", "max"] = "sum") -> None:
        """Reduce a contiguous tensor in place over all ranks, on the CPU in rank order and so bitwise reproducibly.

        Any shape, the same on all ranks; float and integer dtypes, bfloat16 (summed in float32) included.

        Raises:
            CommunicatorAborted: the abort flag was set.
            CommunicatorError: a peer is gone, or is in another operation.
        """
        assert op in ("sum", "max"), op
        group, flat = self._begin(tensor)
        if group is not None and flat.numel():
            begun = time.perf_counter()
            group.all_reduce(flat.view(-1), op)
            self._count("all_reduce", begun, flat)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous tensors of all ranks in rank order, as new tensors; dim 0 may differ in size.

        Raises:
            CommunicatorAborted: the abort flag was set.
            CommunicatorError: a peer is gone, or is in another operation.
        """
        group, tensor = self._begin(tensor)
        if group is None:
            return [tensor.clone()]
        begun = time.perf_counter()
        parts = group.all_gather(tensor)
        self._count("all_gather", begun, tensor)
        return parts

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Copy the contiguous tensor of rank `src` into that of every rank; same shape and dtype on all.

        Raises:
            CommunicatorAborted: the abort flag was set.
            CommunicatorError: a peer is gone, or is in another operation.
        """
        assert 0 <= src < self.size, src
        group, flat = self._begin(tensor)
        if group is not None and flat.numel():
            begun = time.perf_counter()
            group.broadcast(flat.view(-1), src)
            self._count("all_reduce", begun, flat)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> Pending:
        """Start to send a contiguous tensor; messages of one pair and tag arrive in order.

        On shared memory the tensor may be changed at once; `wait` then returns when the receiver has it, which bounds
        the memory that messages under way take.
        """
        assert dst != self.rank and 0 <= dst < self.size, dst
        group, tensor = self._begin(tensor)
        assert group is not None
        begun = time.perf_counter()
        wait_read = group.send(tensor, dst, tag)
        self._count("p2p", begun, tensor)
        return Pending(wait_read, self._waited)

    def recv(self, tensor: torch.Tensor, src: int, tag: int = 0) -> Pending:
        """Start to receive into a contiguous tensor; matches sends of the same pair and tag in the order of calls."""
        assert src != self.rank and 0 <= src < self.size, src
        group, tensor = self._begin(tensor)
        assert group is not None
        self._count("p2p", time.perf_counter(), tensor)
        return Pending(group.recv(tensor, src, tag), self._waited)

    def send_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, dst: int, tag: int = 0) -> Pending:
        """Start to send tensors of any strides as one message, laid end to end and cast to `dtype`; see `send`.

        On shared memory they are copied right into the message. Elsewhere a lone tensor that lies end to end goes out
        from where it lies: it must stay as it is until `wait`.
        """
        assert dst != self.rank and 0 <= dst < self.size, dst
        group = self._live_group()
        if isinstance(group, _SharedGroup):
            begun = time.perf_counter()
            wait_read = group.send_parts(parts, dtype, dst, tag)
            self._count("p2p", begun, *parts)
            return Pending(wait_read, self._waited)
        if _is_message(parts, dtype):
            return Pending(group.send(parts[0].detach(), dst, tag), self._waited)
        message = self._take_buffer(parts, dtype)
        for part, place in zip(parts, _places(message, parts), strict=True):
            place.copy_(part)
        wait_sent = group.send(message, dst, tag)
        return Pending(lambda: self._give_back(wait_sent, message), self._waited)

    def recv_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, src: int, tag: int = 0) -> Pending:
        """Start to receive what `send_parts` sends as `dtype`, into tensors of any strides.

        They are filled when `wait` returns, some of them earlier.
        """
        assert src != self.rank and 0 <= src < self.size, src
        group = self._live_group()
        if isinstance(group, _SharedGroup):
            return Pending(group.recv_parts(parts, dtype, src, tag), self._waited)
        if _is_message(parts, dtype):
            return Pending(group.recv(parts[0].detach(), src, tag), self._waited)
        message = self._take_buffer(parts, dtype)
        wait_received = group.recv(message, src, tag)

        def scatter() -> None:
            wait_received()
            for part, place in zip(parts, _places(message, parts), strict=True):
                part.copy_(place)
            self._buffers.append(message.untyped_storage())

        return Pending(scatter, self._waited)

    def barrier(self) -> None:
        """Wait until all ranks are here.

        Raises:
            CommunicatorAborted: the abort flag was set.
            CommunicatorError: a peer is gone, or is in another operation.
        """
        if self.size > 1:
            self._live_group().barrier()

    def trim(self) -> None:
        """Give the memory of messages that were read back to the system, between two stages of a step."""
        self._buffers.clear()
        if isinstance(self._group, _SharedGroup):
            self._group.trim()

    def release_slots(self) -> None:
        """Give the memory of sums back to the system, after a stage of a step; all ranks call it.

        Raises:
            CommunicatorAborted: the abort flag was set.
            CommunicatorError: a peer is gone, or is in another operation.
        """
        if isinstance(self._group, _SharedGroup):
            self._group.release_slots()

    def close(self) -> None:
        """Leave the group; may be called twice, and by each rank at its own time once all transfers are over."""
        self._buffers.clear()
        group, self._group = self._group, None
        if group is not None:
            group.close()
            self._watch.close()

    def _count(self, own_class: str, begun: float, *tensors: torch.Tensor) -> None:
        if self._spending is not None:
            num_bytes = sum(tensor.nbytes for tensor in tensors)
            self._spending.add(self._class or own_class, time.perf_counter() - begun, num_bytes)

    def _waited(self, seconds: float) -> None:
        if self._spending is not None:
            self._spending.add(self._class or "p2p", seconds, 0)

    def _take_buffer(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor for a message, in memory of an earlier one that is over if one is large enough."""
        count = sum(part.numel() for part in parts)
        fitting = [buffer for buffer in self._buffers if buffer.nbytes() >= count * dtype.itemsize]
        if not fitting:
            return torch.empty(count, dtype=dtype, device=parts[0].device)
        best = min(fitting, key=lambda buffer: buffer.nbytes())
        self._buffers.remove(best)
        return torch.empty(0, dtype=dtype, device=parts[0].device).set_(best)[:count]

    def _give_back(self, wait_sent: Callable[[], None], message: torch.Tensor) -> None:
        wait_sent()
        self._buffers.append(message.untyped_storage())

    def _begin(self, tensor: torch.Tensor) -> tuple[_Group | None, torch.Tensor]:
        assert tensor.is_contiguous(), "communicators move contiguous tensors only"
        if self.size == 1:
            return None, tensor
        return self._live_group(), tensor.detach()

    def _live_group(self) -> _Group:
        assert self._group is not None, "the communicator is closed"
        if self._watch.abort.is_set():
            raise CommunicatorAborted("the command was aborted")
        return self._group


class _SharedGroup(SharedCollectives):
    """Ranks of one host: collectives and messages over one shared segment."""

    def __init__(self, store: distributed.Store, rank: int, size: int, watch: PeerWatch) -> None:
        letters_bytes = mailbox_bytes(size)
        own = SharedSegment.create(size, letters_bytes) if rank == 0 else None
        try:
            card = {"pid": os.getpid(), "descriptor": own.descriptor if own else None}
            cards = _meet_in_store(store, rank, size, card, watch)
            pids = [int(member["pid"]) for member in cards]
            watch.add_peers({peer: pid for peer, pid in enumerate(pids) if peer != rank})
            segment = own or SharedSegment.open(pids[0], int(cards[0]["descriptor"]), size, letters_bytes)
            super().__init__(segment, rank, size, watch)
            self.barrier()  # all have attached
        finally:  # also where a peer never came: the memory would stay with the descriptor
            if own is not None:
                own.close_descriptor()
        self._mailbox = Mailbox(segment, rank, size, pids, watch)

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Callable[[], None]:
        """Put the tensor into the mailbox; the returned function waits until it was read."""
        letter = self._mailbox.post(tensor, dst, tag)
        return lambda: self._mailbox.wait_read(letter, dst, tag)

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Callable[[], None]:
        """Register for the next message; the returned function waits for it and copies it."""
        number = self._mailbox.expect(src, tag)
        return lambda: self._mailbox.fetch(tensor, src, tag, number)

    def send_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, dst: int, tag: int) -> Callable[[], None]:
        """Put tensors into one letter; the returned function waits until it was read."""
        letter = self._mailbox.post_parts(parts, dtype, dst, tag)
        return lambda: self._mailbox.wait_read(letter, dst, tag)

    def recv_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, src: int, tag: int) -> Callable[[], None]:
        """Register for the next message; the returned function waits for it and copies it into the tensors."""
        number = self._mailbox.expect(src, tag)
        return lambda: self._mailbox.fetch_parts(parts, dtype, src, tag, number)

    def trim(self) -> None:
        """Give the memory of messages that were read back to the system."""
        self._mailbox.trim()

    def close(self) -> None:
        """Let go of the shared memory; it is freed when the last rank has done so."""
        self._mailbox.close()


def _new_client(store_address: tuple[str, int]) -> distributed.TCPStore:
    """Return a new client of the driver's store.

    It asks the name service what its own address is called, which takes 5 s and more where that is out of reach.
    """
    return distributed.TCPStore(*store_address, is_master=False, wait_for_workers=False)


_clients: dict[tuple[str, int], distributed.TCPStore] = {}


def _shared_client(store_address: tuple[str, int]) -> distributed.TCPStore:
    """Return the one client of this process, for calls that return at once; its calls take turns."""
    known = _clients.get(store_address)
    if known is not None:
        try:
            known.check(["a key"])
            return known
        except RuntimeError:  # of a store that is gone; another one has its port
            pass
    client = _clients[store_address] = _new_client(store_address)
    return client


def _meet_in_store(
    store: distributed.Store, rank: int, size: int, card: Mapping[str, int | None], watch: PeerWatch
) -> list[dict[str, int]]:
    """Leave this rank's card in the store, wait for those of all ranks, and return them in rank order."""
    store.set(f"member/{rank}", json.dumps(card))
    keys = [f"member/{peer}" for peer in range(size)]

    def describe() -> str:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        return f"rank {rank} of {size} waits for rank {', '.join(missing)} to join the group"

    wait_until(lambda: store.check(keys), watch, describe)
    return [json.loads(store.get(key)) for key in keys]


def _is_message(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Return whether a message would hold just what lies in memory already."""
    return len(parts) == 1 and parts[0].dtype == dtype and parts[0].is_contiguous()


def _places(message: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return where in a flat message each part lies."""
    pieces = message.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
