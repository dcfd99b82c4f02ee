"""A worker's part of the start-up probe: how fast it multiplies, and reads its memory, through the model's own kernels.

All devices measure at the same time, since a step uses them at the same time: what they share is shared here too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nereus.model.linear import make_product, product
from nereus.runtime.communicator import Communicator
from nereus.runtime.worker import WorkerContext, is_out_of_memory

# A product as in a layer of a small model: large enough that its kernel is at its best on a core.
_TOKENS, _INPUT, _OUTPUT = 768, 576, 1536
_TOKENS_CUDA, _INPUT_CUDA, _OUTPUT_CUDA = 8192, 4096, 4096
# Weights that one token is multiplied by, as in decoding: more than a processor's cache has room for.
_COLUMNS, _ROWS = 1024, 16384
# Where memory is short both are halved, so often at most.
_MOST_HALVINGS, _MOST_HALVINGS_READ = 3, 6
_REPEATS = 5


@dataclass(frozen=True)
class ComputeOrder:
    """What is to be measured: by which devices at the same time, ascending, and in which dtype."""

    devices: tuple[int, ...]
    epoch: int
    dtype: torch.dtype


@dataclass(frozen=True)
class ComputeSpeeds:
    """What one device reaches: FLOP/s of a large product, and bytes/s of weights read for a single token."""

    flops: float
    read_bytes_s: float


@dataclass(frozen=True)
class _Work:
    """A call that is measured, and its amount: FLOP, or bytes that it reads."""

    amount: float
    call: Callable[[], torch.Tensor]


@torch.no_grad()
def probe_compute(order: ComputeOrder, context: WorkerContext) -> ComputeSpeeds:
    """Measure, all devices of the order at the same time.

    Raises:
        CommunicatorError: a peer is gone.
    """
    communicator = Communicator.connect(
        store_address=context.store_address,
        name="probe/compute",
        epoch=order.epoch,
        rank=order.devices.index(context.device),
        size=len(order.devices),
        torch_device=context.torch_device,
        abort=context.abort,
    )
    try:
        return ComputeSpeeds(_flops(order, context, communicator), _read_bytes_s(order, context, communicator))
    finally:
        communicator.close()


def _flops(order: ComputeOrder, context: WorkerContext, communicator: Communicator) -> float:
    device = context.torch_device
    on_cuda = device.type == "cuda"
    tokens, columns, rows = (_TOKENS_CUDA, _INPUT_CUDA, _OUTPUT_CUDA) if on_cuda else (_TOKENS, _INPUT, _OUTPUT)

    def make(halvings: int) -> _Work:
        x = torch.ones(tokens >> halvings, columns, dtype=order.dtype, device=device)
        weight = torch.ones(rows >> halvings, columns, dtype=order.dtype, device=device)
        return _Work(2.0 * x.shape[0] * weight.numel(), lambda: product(x, weight))

    return _rate(_make_fitting(make, _MOST_HALVINGS), context, communicator)


def _read_bytes_s(order: ComputeOrder, context: WorkerContext, communicator: Communicator) -> float:
    x = torch.ones(1, _COLUMNS, dtype=order.dtype, device=context.torch_device)

    def make(halvings: int) -> _Work:
        weight = torch.ones(_ROWS >> halvings, _COLUMNS, dtype=order.dtype, device=context.torch_device)
        multiply = make_product(weight, None, packed=True)
        return _Work(weight.nbytes, lambda: multiply(x))

    return _rate(_make_fitting(make, _MOST_HALVINGS_READ), context, communicator)


def _make_fitting(make: Callable[[int], _Work], most_halvings: int) -> _Work:
    """Return the work that `make` makes with as few halvings of its size as memory allows."""
    for halvings in range(most_halvings):
        try:
            return _tried(make(halvings))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    return _tried(make(most_halvings))


def _tried(work: _Work) -> _Work:
    """Return the work, if memory holds two of its results: by the next call what is free may be in two parts."""
    _ = work.call(), work.call()
    return work


def _rate(work: _Work, context: WorkerContext, communicator: Communicator) -> float:
    return work.amount / _median_s(work.call, context, communicator)


def _median_s(call: Callable[[], object], context: WorkerContext, communicator: Communicator) -> float:
    """Return the median seconds of some calls after one to warm up; all ranks begin each at the same time."""
    times = []
    for _ in range(1 + _REPEATS):
        _synchronize(context.torch_device)
        communicator.barrier()
        begun = time.perf_counter()
        call()
        _synchronize(context.torch_device)
        times.append(time.perf_counter() - begun)
    return max(1e-9, statistics.median(times[1:]))


def _synchronize(torch_device: torch.device) -> None:
    if torch_device.type == "cuda":
        torch.cuda.synchronize(torch_device)
