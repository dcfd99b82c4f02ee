"""Messages between two processes of one host through shared memory.

A send copies its tensor at once into a buffer of the sender and puts a letter (tag, number, buffer) on the line of its
destination; a receive finds the letter by tag and number, copies, and marks it as read, which frees the buffer. So a
send never waits for its receiver (unless `LETTERS` of them are unread), and no order of sends, receives and waits can
deadlock. gloo's send and receive can't be polled or cancelled (a timed-out wait closes the connection), and are slower.

A letter is one cache line: number + 1 once written (0: free), tag, byte count, buffer id, descriptor, capacity, bytes
that are in the buffer already: the receiver of a long message copies while the sender still does. Ordering is relied on
as in `shared_reduce`: the first word is written after the others and cleared last, the last one after the bytes.
"""

import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from nereus.runtime.shared_reduce import SharedSegment, open_descriptor_of
from nereus.runtime.waiting import CommunicatorError, PeerWatch, wait_until

LETTERS = 128
_LETTER_BYTES = 64
_LETTER_WORDS = 8
_SMALLEST_BUFFER_BYTES = 64 << 10
_PIECE_BYTES = 1 << 20


def mailbox_bytes(size: int) -> int:
    """Return the bytes that the letters of a group of `size` ranks take in its segment."""
    return size * size * LETTERS * _LETTER_BYTES


class _Buffer:
    """One piece of shared memory that holds one message at a time."""

    def __init__(self, descriptor: int, capacity_bytes: int) -> None:
        self._memory = mmap.mmap(descriptor, capacity_bytes)
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def release_pages(self) -> None:
        """Give the pages back to the system, in all processes; the next message finds new ones."""
        self._memory.madvise(mmap.MADV_REMOVE)


class Mailbox:
    """Point-to-point messages of one rank; see the module's text."""

    def __init__(self, segment: SharedSegment, rank: int, size: int, pids: list[int], watch: PeerWatch) -> None:
        self._words = segment.words
        self._first_word = segment.mailbox_offset_bytes // 8
        self._rank = rank
        self._size = size
        self._pids = pids
        self._watch = watch
        self._own: list[tuple[int, int, _Buffer]] = []  # descriptor, capacity, buffer; the index is the buffer's id
        self._free: list[int] = []
        self._unread: dict[int, int] = {}  # word of a letter -> id of its buffer
        self._next_letter = [0] * size
        self._look_at = [0] * size
        self._sent: dict[tuple[int, int], int] = defaultdict(int)
        self._expected: dict[tuple[int, int], int] = defaultdict(int)
        self._peer_buffers: dict[tuple[int, int], _Buffer] = {}

    def post(self, tensor: torch.Tensor, dst: int, tag: int) -> int:
        """Copy a contiguous tensor into a letter to `dst`; return the letter, for `wait_read`."""
        return self.post_parts([tensor], tensor.dtype, dst, tag)

    def post_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, dst: int, tag: int) -> int:
        """Copy tensors of any strides, laid end to end and cast to `dtype`, into a letter to `dst`; return it."""
        num_bytes = sum(part.numel() for part in parts) * dtype.itemsize
        number = self._sent[dst, tag]
        self._sent[dst, tag] = number + 1
        letter = self._letter(self._rank, dst, self._next_letter[dst])
        self._next_letter[dst] = (self._next_letter[dst] + 1) % LETTERS
        self.wait_read(letter, dst, tag)
        buffer_id = self._take_buffer(num_bytes)
        descriptor, capacity, buffer = self._own[buffer_id]
        words = self._words
        words[letter + 1], words[letter + 2], words[letter + 3] = tag, num_bytes, buffer_id
        words[letter + 4], words[letter + 5], words[letter + 6] = descriptor, capacity, 0
        self._unread[letter] = buffer_id
        words[letter] = number + 1

        def copy(part: torch.Tensor, start: int, end: int) -> None:
            buffer.data[start:end].view(dtype).view(part.shape).copy_(part)
            words[letter + 6] = end

        _walk(parts, dtype, copy)
        return letter

    def wait_read(self, letter: int, dst: int, tag: int) -> None:
        """Wait until the receiver has copied the message; `dst` and `tag` are for the text of an error."""
        words = self._words
        if words[letter]:
            text = f"rank {self._rank} waits for rank {dst} to take a message (send with tag {tag})"
            wait_until(lambda: not words[letter], self._watch, lambda: text)

    def expect(self, src: int, tag: int) -> int:
        """Return the number of the message that the next receive from `src` with `tag` is about."""
        number = self._expected[src, tag]
        self._expected[src, tag] = number + 1
        return number

    def fetch(self, tensor: torch.Tensor, src: int, tag: int, number: int) -> None:
        """Wait for a message and copy it into a contiguous tensor.

        Raises:
            CommunicatorError: the message has another size than the tensor.
        """
        self.fetch_parts([tensor], tensor.dtype, src, tag, number)

    def fetch_parts(self, parts: Sequence[torch.Tensor], dtype: torch.dtype, src: int, tag: int, number: int) -> None:
        """Wait for a message of `dtype` and copy it, front to back, into tensors of any strides and dtype.

        Raises:
            CommunicatorError: the message has another size than the tensors.
        """
        found: list[int] = []

        def arrived() -> bool:
            letter = self._find(src, tag, number)
            if letter is not None:
                found.append(letter)
            return letter is not None

        def describe() -> str:
            return f"rank {self._rank} waits for message {number} of rank {src} (recv with tag {tag})"

        wait_until(arrived, self._watch, describe)
        words, letter = self._words, found[0]
        num_bytes, wanted = words[letter + 2], sum(part.numel() for part in parts) * dtype.itemsize
        if num_bytes != wanted:
            raise CommunicatorError(
                f"rank {self._rank} expects {wanted} bytes from rank {src} with tag {tag}, which sent {num_bytes}"
            )
        if num_bytes:
            buffer = self._open_buffer(src, words[letter + 3], words[letter + 4], words[letter + 5])

            def copy(part: torch.Tensor, start: int, end: int) -> None:
                if words[letter + 6] < end:
                    wait_until(lambda: words[letter + 6] >= end, self._watch, describe)
                part.copy_(buffer.data[start:end].view(dtype).view(part.shape))

            _walk(parts, dtype, copy)
        words[letter] = 0

    def trim(self) -> None:
        """Give the memory of messages that were read back to the system; the buffers stay."""
        self._collect_read()
        for buffer_id in self._free:
            self._own[buffer_id][2].release_pages()

    def close(self) -> None:
        """Let go of all buffers; messages that were not read yet are lost."""
        for descriptor, _, _ in self._own:
            os.close(descriptor)
        self._own.clear()
        self._peer_buffers.clear()

    def _letter(self, src: int, dst: int, index: int) -> int:
        return self._first_word + ((src * self._size + dst) * LETTERS + index) * _LETTER_WORDS

    def _find(self, src: int, tag: int, number: int) -> int | None:
        words = self._words
        for step in range(LETTERS):  # mostly read in the order of sending: look first after the one read last
            index = (self._look_at[src] + step) % LETTERS
            letter = self._letter(src, self._rank, index)
            if words[letter] == number + 1 and words[letter + 1] == tag:
                self._look_at[src] = (index + 1) % LETTERS
                return letter
        return None

    def _take_buffer(self, num_bytes: int) -> int:
        """Return the id of a free buffer of at least this size, the smallest that fits; make one if there is none."""
        self._collect_read()
        fitting = [buffer_id for buffer_id in self._free if self._own[buffer_id][1] >= num_bytes]
        if fitting:
            best = min(fitting, key=lambda buffer_id: (self._own[buffer_id][1], buffer_id))
            self._free.remove(best)
            return best
        capacity = max(_SMALLEST_BUFFER_BYTES, 1 << max(0, num_bytes - 1).bit_length())
        descriptor = os.memfd_create("nereus-message", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, capacity)
        self._own.append((descriptor, capacity, _Buffer(descriptor, capacity)))
        return len(self._own) - 1

    def _collect_read(self) -> None:
        for letter, buffer_id in list(self._unread.items()):
            if not self._words[letter]:
                del self._unread[letter]
                self._free.append(buffer_id)

    def _open_buffer(self, src: int, buffer_id: int, descriptor: int, capacity: int) -> _Buffer:
        buffer = self._peer_buffers.get((src, buffer_id))
        if buffer is None:
            own = open_descriptor_of(self._pids[src], descriptor)
            try:
                buffer = self._peer_buffers[src, buffer_id] = _Buffer(own, capacity)
            finally:
                os.close(own)
        return buffer


def _walk(parts: Sequence[torch.Tensor], dtype: torch.dtype, copy: Callable[[torch.Tensor, int, int], None]) -> None:
    """Call `copy(part, start, end)` for pieces of about a MiB, in order, with their place in the message in bytes."""
    start = 0
    for part in parts:
        for piece in _cut(part, _PIECE_BYTES // dtype.itemsize):
            end = start + piece.numel() * dtype.itemsize
            copy(piece, start, end)
            start = end


def _cut(part: torch.Tensor, most_elements: int) -> Sequence[torch.Tensor]:
    if part.numel() <= most_elements:
        return [part] if part.numel() else []
    if part.is_contiguous():
        return part.view(-1).split(most_elements)
    return part.split(max(1, most_elements * part.shape[0] // part.numel()))
