"""Collectives between processes of one host through shared memory, reduced in rank order.

One segment a group. Every rank has a counter on a cache line of its own, a header line and a slot, the latter two
twice (double buffering):

    counters [size] | headers [2][size] | mailbox area | slots [2][size][REDUCE_SLOT_BYTES]

A barrier is: add one to my counter, then wait until no counter is behind mine. Buffers alternate with every use, so a
buffer is written again only after a barrier that its last readers entered when they were done: one barrier is enough
for small messages, two a chunk for large ones.

Memory ordering: data is written before the counter by the same thread, and read after the counter by the reader. Both
orders are kept by x86-64 for plain stores and loads (total store order), and each counter is written by one aligned
8-byte store. Other processors may reorder them, and Python has no fence: `shared_memory_is_ordered` is False there and
communicators take another way. The segment is a memfd, found by peers under /proc: it has no name that could be left
behind, and /dev/shm's size doesn't bound it.
"""

import mmap
import os
import platform
from collections.abc import Callable, Sequence

import torch

from nereus.limits import REDUCE_SLOT_BYTES, REDUCE_WHOLE_BYTES
from nereus.runtime.waiting import CommunicatorError, PeerWatch, wait_until

_LINE_BYTES = 64
_LINE_WORDS = _LINE_BYTES // 8
_PAGE_BYTES = 4096
_MAX_CACHED_VIEWS = 512
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_OPERATIONS = ("sum", "max", "all_gather", "broadcast")


def shared_memory_is_ordered() -> bool:
    """Return whether plain stores become visible in program order, which this module relies on."""
    return platform.machine() in ("x86_64", "AMD64")


def reduce_in_rank_order(parts: Sequence[torch.Tensor], op: str, out: torch.Tensor) -> None:
    """Write ((parts[0] + parts[1]) + parts[2]) + ... to `out`, or the maximum; `out` overlaps none of the parts.

    bfloat16 and float16 are summed in float32 and rounded once, so every rank gets the same bits whoever does the sum.
    """
    combine: Callable[..., torch.Tensor] = torch.add if op == "sum" else torch.maximum
    if op == "sum" and len(parts) > 2 and out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        out.copy_(total)
        return
    combine(parts[0], parts[1], out=out)
    for part in parts[2:]:
        combine(out, part, out=out)


class SharedSegment:
    """Memory shared by the ranks of one group.

    Attributes:
        words: the segment as signed 64-bit words, for counters and headers.
        data: the segment as a flat uint8 tensor.
        mailbox_bytes, slots_bytes: where the areas begin.
    """

    def __init__(self, descriptor: int, size: int, mailbox_bytes: int) -> None:
        self.descriptor: int | None = descriptor
        self._size = size
        self.mailbox_offset_bytes = 3 * size * _LINE_BYTES
        self.slots_offset_bytes = -(-(self.mailbox_offset_bytes + mailbox_bytes) // _PAGE_BYTES) * _PAGE_BYTES
        self.num_bytes = self.slots_offset_bytes + 2 * size * REDUCE_SLOT_BYTES
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, self.num_bytes)
        assert os.fstat(descriptor).st_size == self.num_bytes, "ranks disagree about the group's size"
        self._memory = mmap.mmap(descriptor, self.num_bytes)
        self.words = memoryview(self._memory).cast("q")
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    @classmethod
    def create(cls, size: int, mailbox_bytes: int) -> "SharedSegment":
        """Make the segment of a group of `size` ranks; peers open `descriptor` of this process."""
        return cls(os.memfd_create("nereus-group", os.MFD_CLOEXEC), size, mailbox_bytes)

    @classmethod
    def open(cls, pid: int, descriptor: int, size: int, mailbox_bytes: int) -> "SharedSegment":
        """Attach to the segment that process `pid` holds open as `descriptor`.

        Raises:
            CommunicatorError: that process has ended or may not be looked into.
        """
        segment = cls(open_descriptor_of(pid, descriptor), size, mailbox_bytes)
        segment.close_descriptor()
        return segment

    def slot_offset_bytes(self, buffer: int, rank: int) -> int:
        """Return where the slot of a rank begins in one of the two buffers."""
        return self.slots_offset_bytes + (buffer * self._size + rank) * REDUCE_SLOT_BYTES

    def release_slots(self, rank: int) -> None:
        """Give the pages of a rank's slots back to the system, in all processes; the next sum finds new ones."""
        for buffer in (0, 1):
            self._memory.madvise(mmap.MADV_REMOVE, self.slot_offset_bytes(buffer, rank), REDUCE_SLOT_BYTES)

    def close_descriptor(self) -> None:
        """Close the descriptor; the memory lives as long as somebody maps it."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def open_descriptor_of(pid: int, descriptor: int) -> int:
    """Return a descriptor of this process for what process `pid` holds open as `descriptor`."""
    try:
        return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommunicatorError(f"the shared memory of process {pid} can't be opened: {error}") from error


class SharedCollectives:
    """Collectives of one rank over a `SharedSegment`; all ranks call the same operations in the same order."""

    def __init__(self, segment: SharedSegment, rank: int, size: int, watch: PeerWatch) -> None:
        self._segment = segment
        self._words = segment.words
        self._rank = rank
        self._size = size
        self._watch = watch
        self._sequence = 0
        self._buffer = 0
        self._peers = [peer * _LINE_WORDS for peer in range(size) if peer != rank]
        self._views: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}
        self._holds_slots = False  # the same on all ranks, as their operations are

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._signal()
        self._await_peers("a barrier")

    def release_slots(self) -> None:
        """Give the memory of sums that are over back to the system; all ranks call it, as any other operation."""
        if self._holds_slots:
            self.barrier()  # the others have read what they want
            self._segment.release_slots(self._rank)
            self._holds_slots = False

    def all_reduce(self, flat: torch.Tensor, op: str) -> None:
        """Reduce a flat contiguous tensor in place, in rank order; bitwise equal on all ranks."""
        if flat.numel() * flat.element_size() > REDUCE_WHOLE_BYTES:
            self._all_reduce_chunks(flat, op)
            return
        slots = self._take_slots(flat.dtype, flat.numel())
        slots[self._rank].copy_(flat)
        self._meet(op, flat.dtype, flat.numel())
        reduce_in_rank_order(slots, op, flat)

    def _all_reduce_chunks(self, flat: torch.Tensor, op: str) -> None:
        """Reduce chunk by chunk: each rank reduces its part of a chunk, then all copy the parts of the others.

        The next chunk is offered before the sums of this one are fetched, so ranks wait for each other less.
        """
        chunks = flat.split(REDUCE_SLOT_BYTES // flat.element_size())
        slots = self._offer_chunk(chunks[0], op)
        for index, chunk in enumerate(chunks):
            bounds = self._bounds(chunk)
            low, high = bounds[self._rank], bounds[self._rank + 1]
            self._hear()
            # My own part of my own slot is unwritten so far: the sum goes there, where the others read it.
            parts = [chunk if peer == self._rank else slots[peer] for peer in range(self._size)]
            reduce_in_rank_order([part[low:high] for part in parts], op, slots[self._rank][low:high])
            self.barrier()
            sums = slots
            if index + 1 < len(chunks):
                slots = self._offer_chunk(chunks[index + 1], op)
            for peer, part in enumerate(sums):
                chunk[bounds[peer] : bounds[peer + 1]].copy_(part[bounds[peer] : bounds[peer + 1]])

    def _offer_chunk(self, chunk: torch.Tensor, op: str) -> list[torch.Tensor]:
        """Put what the others will reduce into my slot, and say so; return all slots."""
        bounds = self._bounds(chunk)
        slots = self._take_slots(chunk.dtype, chunk.numel())
        for piece in (slice(0, bounds[self._rank]), slice(bounds[self._rank + 1], None)):
            slots[self._rank][piece].copy_(chunk[piece])
        self._say(op, chunk.dtype, chunk.numel())
        return slots

    def _bounds(self, chunk: torch.Tensor) -> list[int]:
        return [chunk.numel() * part // self._size for part in range(self._size + 1)]

    def broadcast(self, flat: torch.Tensor, src: int) -> None:
        """Copy the flat contiguous tensor of rank `src` into that of every rank."""
        per_chunk = REDUCE_SLOT_BYTES // flat.element_size()
        for start in range(0, flat.numel(), per_chunk):
            chunk = flat[start : start + per_chunk]
            slots = self._take_slots(flat.dtype, chunk.numel())
            if self._rank == src:
                slots[src].copy_(chunk)
            self._meet("broadcast", flat.dtype, flat.numel() - start)
            if self._rank != src:
                chunk.copy_(slots[src])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the contiguous tensors of all ranks; they may differ in size along dim 0."""
        row_shape = tensor.shape[1:]
        num_rows = tensor.shape[0] if tensor.dim() else 1
        flat = tensor.view(-1)
        rows, outputs, start, rounds = [0], [], 0, 1
        per_chunk = REDUCE_SLOT_BYTES // flat.element_size()
        while rounds > 0:
            slots = self._take_slots(flat.dtype, per_chunk)
            mine = flat[start : start + per_chunk]
            slots[self._rank][: mine.numel()].copy_(mine)
            if start == 0:
                rows = self._meet("all_gather", flat.dtype, row_shape.numel(), own_count=num_rows)
                outputs = [flat.new_empty(count * row_shape.numel()) for count in rows]
                rounds = max(1, -(-max(rows) * row_shape.numel() // per_chunk))
            else:
                self.barrier()
            for output, slot in zip(outputs, slots, strict=True):
                piece = output[start : start + per_chunk]
                piece.copy_(slot[: piece.numel()])
            start, rounds = start + per_chunk, rounds - 1
        if tensor.dim() == 0:
            return [output.view(()) for output in outputs]
        return [output.view(count, *row_shape) for count, output in zip(rows, outputs, strict=True)]

    def _take_slots(self, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
        """Switch to the other buffer and return its slots as tensors of `count` elements, one a rank."""
        self._buffer ^= 1
        self._holds_slots = True
        key = (dtype, count, self._buffer)
        slots = self._views.get(key)
        if slots is None:
            if len(self._views) >= _MAX_CACHED_VIEWS:
                self._views.clear()
            num_bytes = count * dtype.itemsize
            offsets = [self._segment.slot_offset_bytes(self._buffer, rank) for rank in range(self._size)]
            slots = [self._segment.data[offset : offset + num_bytes].view(dtype) for offset in offsets]
            self._views[key] = slots
        return slots

    def _signal(self) -> None:
        """Advance my counter: all that I wrote before is for the others to read."""
        self._sequence += 1
        self._words[self._rank * _LINE_WORDS] = self._sequence

    def _await_peers(self, operation: str | int) -> None:
        """Wait until no counter is behind mine, in a named operation or one given by the first word of its header."""
        words, sequence = self._words, self._sequence
        for index in self._peers:
            if words[index] < sequence:
                wait_until(
                    lambda index=index: words[index] >= sequence,  # type: ignore[misc]
                    self._watch,
                    lambda index=index: self._describe_wait(index // _LINE_WORDS, operation),  # type: ignore[misc]
                )

    def _describe_wait(self, peer: int, operation: str | int) -> str:
        name = _read_said(operation) if isinstance(operation, int) else operation
        return f"rank {self._rank} waits for rank {peer} in {name} (exchange {self._sequence} of the group)"

    def _meet(self, op: str, dtype: torch.dtype, count: int, *, own_count: int = 0) -> list[int]:
        """Say what I am about to do, wait for the others, check that they do the same; return their own counts."""
        self._say(op, dtype, count, own_count)
        return self._hear()

    def _say(self, op: str, dtype: torch.dtype, count: int, own_count: int = 0) -> None:
        """Write my header of the current buffer and signal."""
        own = self._header(self._rank)
        self._words[own] = _OPERATIONS.index(op) | _DTYPES.index(dtype) << 8 | count << 16
        self._words[own + 1] = own_count
        self._signal()

    def _hear(self) -> list[int]:
        """Wait for what the others say and return their own counts.

        Raises:
            CommunicatorError: a peer is in another operation, or has another dtype or size.
        """
        words = self._words
        said = words[self._header(self._rank)]
        self._await_peers(said)
        own_counts = []
        for peer in range(self._size):
            header = self._header(peer)
            if words[header] != said:
                raise CommunicatorError(
                    f"rank {self._rank} is in {_read_said(said)} while rank {peer} is in {_read_said(words[header])}"
                )
            own_counts.append(words[header + 1])
        return own_counts

    def _header(self, rank: int) -> int:
        """Return the word where the header of a rank begins in the current buffer."""
        return ((1 + self._buffer) * self._size + rank) * _LINE_WORDS


def _read_said(word: int) -> str:
    return f"{_OPERATIONS[word & 255]} of {word >> 16} {_DTYPES[word >> 8 & 255]}"
