"""Slices from devices to devices, for any pair of layouts: few large messages, gathered from where the slices lie.

Sender and receiver cut the same list of copies into the same messages, so nothing but numbers travels.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nereus.layout import Copy
from nereus.runtime.communicator import Communicator, Pending
from storage.slices import TensorSlice

# Messages under way for each pair of devices and direction: at least so many, one is filled while the other is read,
# and no more than fit into a mailbox (which has room for 128).
LEAST_IN_FLIGHT, _MOST_IN_FLIGHT = 2, 32


class Slices(Protocol):
    """What a device holds, by slices."""

    def find(self, part: TensorSlice) -> Tensor:
        """Return a view of exactly `part`, which must be held here."""


@dataclass(frozen=True)
class Bucket:
    """Parts that travel between two devices in one message."""

    parts: tuple[TensorSlice, ...]
    num_elements: int


@dataclass(frozen=True)
class Exchange:
    """One device's part of some copies: what it keeps, and by rank of the communicator what it sends and receives.

    `window_elements` may be under way to or from each of them.
    """

    local: tuple[TensorSlice, ...]
    sends: Mapping[int, tuple[Bucket, ...]]
    receives: Mapping[int, tuple[Bucket, ...]]
    window_elements: int

    @property
    def received_elements(self) -> int:
        return sum(bucket.num_elements for buckets in self.receives.values() for bucket in buckets)


def most_peers(copies: Sequence[Copy]) -> int:
    """Return with how many others a device exchanges slices at most, in one direction; at least 1."""
    peers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for copy in copies:
        if copy.source != copy.target:
            peers["to", copy.source].add(copy.target)
            peers["from", copy.target].add(copy.source)
    return max(map(len, peers.values()), default=1)


def plan_exchange(
    copies: Sequence[Copy],
    devices: Sequence[int],
    device: int,
    *,
    most_elements: int,
    window_elements: int = 0,
    lone_elements: int | None = None,
) -> Exchange:
    """Return a device's part of copies that all take part in.

    Args:
        devices: in the order of their ranks in the communicator.
        most_elements: of a message; the same on all devices.
        window_elements: may be under way at the same time, each way between two devices; two messages in any case.
        lone_elements: slices of so many or more are messages of their own; the same on all devices. None: none is.
    """
    local: list[TensorSlice] = []
    outgoing: dict[int, list[TensorSlice]] = defaultdict(list)
    incoming: dict[int, list[TensorSlice]] = defaultdict(list)
    for copy in copies:
        if copy.source == copy.target == device:
            local.append(copy.slice)
        elif copy.source == device:
            outgoing[copy.target].append(copy.slice)
        elif copy.target == device:
            incoming[copy.source].append(copy.slice)

    lone = most_elements if lone_elements is None else lone_elements

    def buckets(parts: Mapping[int, list[TensorSlice]]) -> dict[int, tuple[Bucket, ...]]:
        return {devices.index(peer): tuple(cut_buckets(parts[peer], most_elements, lone)) for peer in sorted(parts)}

    window_elements = max(window_elements, LEAST_IN_FLIGHT * most_elements)
    return Exchange(tuple(local), buckets(outgoing), buckets(incoming), window_elements)


def cut_buckets(parts: Sequence[TensorSlice], most_elements: int, lone_elements: int) -> list[Bucket]:
    """Group parts, in order, into messages of at most `most_elements`; a part larger than that is cut along rows.

    Parts of `lone_elements` or more are messages of their own.
    """
    buckets: list[Bucket] = []
    held: list[TensorSlice] = []
    size = 0
    for part in (piece for whole in parts for piece in _cut_rows(whole, most_elements)):
        if part.num_elements >= lone_elements:
            buckets.append(Bucket((part,), part.num_elements))
            continue
        if held and size + part.num_elements > most_elements:
            buckets.append(Bucket(tuple(held), size))
            held, size = [], 0
        held.append(part)
        size += part.num_elements
    if held:
        buckets.append(Bucket(tuple(held), size))
    return buckets


def _cut_rows(part: TensorSlice, most_elements: int) -> Iterator[TensorSlice]:
    if part.num_elements <= most_elements:
        yield part
        return
    row = part.num_elements // part.sizes[0]
    step = max(1, most_elements // row)
    for start in range(0, part.sizes[0], step):
        rows = min(step, part.sizes[0] - start)
        yield TensorSlice(part.name, (part.starts[0] + start, *part.starts[1:]), (rows, *part.sizes[1:]))


@torch.no_grad()
def run_exchange(
    exchange: Exchange, source: Slices | None, target: Slices | None, communicator: Communicator, dtype: torch.dtype
) -> None:
    """Copy everything. When it returns, all that was asked of `source` is read and all of `target` is filled.

    All sends and receives of a round are posted before any is awaited, on all devices in one order (by sender and
    receiver), so neither their order nor a transport that takes them one by one can deadlock.

    Args:
        source: what slices are copied from, of any dtype; None: this device sends nothing.
        target: what they are copied to.
        dtype: of the messages: casting is the sender's work.
    """
    for part in exchange.local:
        assert source is not None and target is not None
        target.find(part).copy_(source.find(part))
    me, window = communicator.rank, _Window(exchange.window_elements)
    pairs = sorted([(me, peer) for peer in exchange.sends] + [(peer, me) for peer in exchange.receives])
    all_buckets = [*exchange.sends.values(), *exchange.receives.values()]
    rounds = max(map(len, all_buckets), default=0)
    for index in range(rounds):
        posted: list[Pending] = []
        largest = max(buckets[index].num_elements for buckets in all_buckets if index < len(buckets))
        window.make_room(largest)
        for sender, receiver in pairs:
            buckets = exchange.sends[receiver] if sender == me else exchange.receives[sender]
            if index >= len(buckets):
                continue
            store = source if sender == me else target
            assert store is not None
            parts = [store.find(part) for part in buckets[index].parts]
            if sender == me:
                posted.append(communicator.send_parts(parts, dtype, receiver, index))
            else:
                posted.insert(0, communicator.recv_parts(parts, dtype, sender, index))
        window.add(posted, largest)
    window.close()


class _Window:
    """Rounds of messages under way, of bounded size in all."""

    def __init__(self, most_elements: int) -> None:
        self._most, self._elements = most_elements, 0
        self._rounds = deque[tuple[Sequence[Pending], int]]()

    def make_room(self, num_elements: int) -> None:
        """Wait for the oldest rounds until one of this size fits."""
        while self._rounds and (self._elements + num_elements > self._most or len(self._rounds) == _MOST_IN_FLIGHT):
            self._wait()

    def add(self, posted: Sequence[Pending], num_elements: int) -> None:
        self._rounds.append((posted, num_elements))
        self._elements += num_elements

    def close(self) -> None:
        while self._rounds:
            self._wait()

    def _wait(self) -> None:
        posted, num_elements = self._rounds.popleft()
        self._elements -= num_elements
        for transfer in posted:
            transfer.wait()
