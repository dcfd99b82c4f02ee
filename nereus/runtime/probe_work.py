"""A worker's part of the start-up probe: how fast its memory, its links and its storage move a few MiB.

Nothing is warm here that isn't in a transition: copies go to new memory, as into tensors that were just made.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nereus.cluster import Link
from nereus.runtime.communicator import Communicator, Pending
from nereus.runtime.pages import new_tensors
from nereus.runtime.probe_storage import StorageSpeeds, probe_storage
from nereus.runtime.unit_sums import hash_buffer, hash_piece
from nereus.runtime.worker import WorkerContext, is_out_of_memory, trim_heap
from nereus.transition.moves import setup_messages
from storage.checksums import piece_seed

_SHAPE = (1024, 1024)  # float32: 4 MiB, about as large as a layer's matrices
_NUM_TENSORS = 8  # in all more than a processor's cache has room for: a transition's tensors aren't in there either
_SMALL_SHAPE = (64,)  # a norm's weight
_NUM_SMALL = 50
_REPEATS = 3
_CONNECTS = 3
# What takes longer than this isn't measured again.
_ENOUGH_S = 0.1


@dataclass(frozen=True)
class ProbeOrder:
    """What a device is to measure.

    Attributes:
        devices: all that take part at the same time, ascending: the ranks of its communicators.
        epoch: of these communicators.
        folder: one for this device alone, any fsspec URL; it doesn't exist before, nor afterwards.
        limit_s: for storage; what isn't done by then counts as if it ended then.
        same_host: whether shared memory may join the devices.
    """

    devices: tuple[int, ...]
    epoch: int
    folder: str
    limit_s: float
    same_host: bool = True


@dataclass(frozen=True)
class ProbeResult:
    """What one device has measured while all others did the same.

    Attributes:
        seconds: of all of it.
        copy: inside the device, into new memory; a message is a tensor.
        verify: summing up; a message is a piece.
        one_way: into another device's new memory, packing included; None without another device.
        both_ways: each way, while all send and receive at once.
        setup_s: for each message that the set-up of a communicator is long.
    """

    copy: Link
    verify: Link
    one_way: Link | None
    both_ways: Link | None
    setup_s: float
    storage: StorageSpeeds
    seconds: float = 0.0


def probe(order: ProbeOrder, context: WorkerContext) -> ProbeResult:
    """Measure, all devices of the order at the same time, since a transition uses all of them at once.

    Raises:
        CommunicatorError: a peer is gone.
    """
    begun = time.perf_counter()
    communicators: list[Communicator] = []
    try:
        result = _measure(order, context, communicators)
    finally:
        for communicator in communicators:
            communicator.close()
    return replace(result, seconds=time.perf_counter() - begun)


def _measure(order: ProbeOrder, context: WorkerContext, communicators: list[Communicator]) -> ProbeResult:
    connect_s: list[float] = []
    for number in range(_CONNECTS):
        begun = time.perf_counter()
        communicators.append(_connect(order, context, number))
        connect_s.append(time.perf_counter() - begun)
    bench = _Bench(communicators[0], context.torch_device)
    copy, verify = bench.copy(), bench.verify()
    has_peer = len(order.devices) > 1
    one_way, both_ways = (bench.link(both=False), bench.link(both=True)) if has_peer else (None, None)
    setup_s = statistics.median(connect_s) / setup_messages(len(order.devices)) if has_peer else 0.0
    communicators[0].barrier()
    storage = probe_storage(order.folder, bench.tensors, order.limit_s)
    return ProbeResult(copy, verify, one_way, both_ways, setup_s, storage)


def _connect(order: ProbeOrder, context: WorkerContext, number: int) -> Communicator:
    return Communicator.connect(
        store_address=context.store_address,
        name=f"probe/{number}",
        epoch=order.epoch,
        rank=order.devices.index(context.device),
        size=len(order.devices),
        torch_device=context.torch_device,
        abort=context.abort,
        same_host=order.same_host,
    )


class _Bench:
    """Some tensors, and what moving them takes; every call begins on all ranks at the same time."""

    def __init__(self, communicator: Communicator, torch_device: torch.device) -> None:
        self._communicator, self._torch_device = communicator, torch_device
        room = torch.tensor([_room(torch_device)], device=torch_device)
        communicator.all_reduce(room.neg_(), "max")
        self.tensors = [torch.ones(_SHAPE, device=torch_device) for _ in range(-int(room))]
        self._small = [torch.ones(_SMALL_SHAPE, device=torch_device) for _ in range(_NUM_SMALL)]
        self._num_bytes = sum(tensor.nbytes for tensor in self.tensors)

    def copy(self) -> Link:
        """Return the link from a device to itself."""
        return self._link(
            lambda tensors: [new.copy_(old) for new, old in zip(self._new(tensors), tensors, strict=True)]
        )

    def verify(self) -> Link:
        """Return the rate of checksums, by pieces."""
        buffer = hash_buffer()

        def sum_up(tensors: list[Tensor]) -> int:
            seeds = (piece_seed("tensor", index) for index in itertools.count())
            return sum(hash_piece(part, seed, buffer) for part, seed in zip(_parts(tensors), seeds, strict=False))

        return self._link(sum_up)

    def _new(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return new memory such as units are made of, as large as some tensors."""
        shapes = {index: tuple(tensor.shape) for index, tensor in enumerate(tensors)}
        return list(new_tensors(shapes, tensors[0].dtype, self._torch_device).values())

    def link(self, *, both: bool) -> Link:
        """Return the link to the next rank's new memory: all send and receive, or every other one to its neighbour."""
        rank, size = self._communicator.rank, self._communicator.size
        if both:
            target, source = (rank + 1) % size, (rank - 1) % size
        else:
            target = rank + 1 if rank % 2 == 0 and rank + 1 < size else -1
            source = rank - 1 if rank % 2 else -1
        dtype = self.tensors[0].dtype
        most_in_flight = self._communicator.window_bytes // self.tensors[0].nbytes

        def exchange(tensors: list[Tensor], times: int = 1) -> None:
            in_flight: deque[list[Pending]] = deque()
            for _ in range(times):
                received = _parts(self._new(tensors)) if source >= 0 else []
                for index, part in enumerate(_parts(tensors)):
                    posted = [self._communicator.recv_parts([received[index]], dtype, source)] if source >= 0 else []
                    posted += [self._communicator.send_parts([part], dtype, target)] if target >= 0 else []
                    in_flight.append(posted)
                    if len(in_flight) == most_in_flight:
                        _wait(in_flight.popleft())
            for posted in in_flight:
                _wait(posted)

        large_s = self._first_s(lambda: exchange(self.tensors), trim=True)
        if large_s <= _ENOUGH_S:  # in one go: a short burst is quicker than what lasts
            large_s = self._time_s(lambda: exchange(self.tensors, _REPEATS), trim=True) / _REPEATS
        small_s = self._median_s(lambda: exchange(self._small[:1]))
        self._communicator.trim()
        return _link_of(self._num_bytes, large_s, small_s, num_messages=len(_parts(self.tensors)))

    def _link(self, work: Callable[[list[Tensor]], object]) -> Link:
        large_s = self._median_s(lambda: work(self.tensors), trim=True)
        small_s = self._median_s(lambda: work(self._small)) / len(self._small)
        return _link_of(self._num_bytes, large_s, small_s, num_messages=len(self.tensors))

    def _median_s(self, call: Callable[[], object], *, trim: bool = False) -> float:
        """Return the median seconds of some calls, after one to warm up; of that one where it took long on any rank.

        Args:
            trim: each call finds only new memory.
        """
        first_s = self._first_s(call, trim=trim)
        if first_s > _ENOUGH_S:
            return first_s
        return statistics.median(self._time_s(call, trim=trim) for _ in range(_REPEATS))

    def _first_s(self, call: Callable[[], object], *, trim: bool) -> float:
        """Return the seconds of a call on the slowest rank."""
        first = torch.tensor([self._time_s(call, trim=trim)], dtype=torch.float64, device=self._torch_device)
        self._communicator.all_reduce(first, "max")
        return float(first)

    def _time_s(self, call: Callable[[], object], *, trim: bool) -> float:
        if trim:
            trim_heap()
        self._synchronize()
        self._communicator.barrier()
        begun = time.perf_counter()
        kept = call()
        self._synchronize()
        seconds = time.perf_counter() - begun
        del kept
        return seconds

    def _synchronize(self) -> None:
        if self._torch_device.type == "cuda":
            torch.cuda.synchronize(self._torch_device)


def _parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what moves and is summed up: of the large tensors every third is cut along columns, as in a decoder."""
    half, parts = _SHAPE[1] // 2, list[Tensor]()
    for index, tensor in enumerate(tensors):
        is_cut = tensor.shape == _SHAPE and index % 3 == 2
        parts += [tensor[:, :half], tensor[:, half:]] if is_cut else [tensor]
    return parts


def _wait(transfers: Iterable[Pending]) -> None:
    for transfer in transfers:
        transfer.wait()


def _room(torch_device: torch.device) -> int:
    """Return how many tensors can be measured with: with copies, messages and buffers they need four times the room."""
    count = _NUM_TENSORS
    while count > 1:
        try:
            torch.empty((4 * count, *_SHAPE), device=torch_device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            count //= 2
        else:
            break
    return count


def _link_of(num_bytes: int, seconds: float, small_s: float, *, num_messages: int) -> Link:
    """Return the link on which some large messages take `seconds` in all, and a small one `small_s`."""
    small_s = min(small_s, seconds / num_messages / 2)
    return Link(num_bytes / max(1e-9, seconds - num_messages * small_s), small_s)
