"""What a worker does for a benchmark beside its usual work: it times training, products and raw transfers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.linear import make_product, product
from nereus.ppo.learning_rate import LearningRate
from nereus.runtime.pipeline import OneForwardOneBackward
from nereus.runtime.rank import Rank
from nereus.runtime.training import TrainingWork
from nereus.runtime.worker import WorkerContext

# Products of one shape are repeated until this much time is spent.
_PRODUCT_S = 0.05


@dataclass(frozen=True)
class Matrix:
    """`count` matrices [out, in], each multiplied with `rows` rows."""

    out: int
    columns: int
    rows: int
    count: int

    @property
    def flops(self) -> float:
        """Floating point operations of one product with one matrix: forward, or one of two backward."""
        return 2.0 * self.out * self.columns * self.rows


class BenchRank(Rank):
    """A worker of a benchmark."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._gloo: Any = None
        self._buffers: dict[str, Tensor] = {}

    # Training

    def list_matrices(self, model_stage: str, tokens: int, response_tokens: int) -> list[Matrix]:
        """Return the shapes of the model's products; the head sees the response tokens only."""
        shard = self.units[model_stage].shard
        counts: dict[tuple[int, int, int], int] = {}
        for name, parameter in shard.named_parameters():
            if parameter.dim() != 2 or (name == "embed.weight" and not shard.spec.ties_head):
                continue
            rows = response_tokens if parameter is shard.head_weight else tokens
            shape = (*parameter.shape, rows)
            counts[shape] = counts.get(shape, 0) + 1
        return [Matrix(*shape, count) for shape, count in counts.items()]

    def time_training(self, model_stage: str, work: TrainingWork, learning_rate: LearningRate) -> dict[str, float]:
        """Return the seconds of one call of `train`: in all, and of its forward and backward passes."""
        unit, inner = self.units[model_stage].training, 0.0
        assert unit is not None
        run = OneForwardOneBackward.run

        def timed(*arguments: Any) -> None:
            nonlocal inner
            begun = time.perf_counter()
            run(*arguments)
            inner += time.perf_counter() - begun

        OneForwardOneBackward.run = timed  # type: ignore[method-assign, assignment]
        try:
            started = time.perf_counter()
            unit.train(work, learning_rate)
            total = time.perf_counter() - started
        finally:
            OneForwardOneBackward.run = run  # type: ignore[method-assign]
        return {"total": total, "forward_backward": inner}

    def time_products(self, kind: str, dtype: str, matrices: Sequence[Matrix]) -> dict[str, float]:
        """Return the seconds of all products of a kind and their operations: forward, input and weight gradients."""
        seconds = flops = 0.0
        for matrix in matrices:
            x, w, dy = (
                torch.randn(shape, dtype=getattr(torch, dtype))
                for shape in (
                    (matrix.rows, matrix.columns),
                    (matrix.out, matrix.columns),
                    (matrix.rows, matrix.out),
                )
            )
            calls = _products(kind, x, w, dy)
            seconds += matrix.count * sum(_time(call) for call in calls)
            flops += matrix.count * matrix.flops * len(calls)
        return {"seconds": seconds, "flops": flops}

    # Transfers

    def connect_gloo(self, name: str, rank: int, size: int) -> None:
        """Join a plain gloo group for `exchange`."""
        client = distributed.TCPStore(*self.context.store_address, is_master=False, wait_for_workers=False)
        store = distributed.PrefixStore(name, client)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def exchange(self, way: str, sends: Mapping[int, int], receives: Mapping[int, int], local: int) -> int:
        """Copy `local` bytes, send and receive these numbers of bytes by rank; return what was received.

        Args:
            way: "gloo" or "communicator". Buffers are there already, and messages are as large as in a weight sync.
        """
        assert self._sync is not None
        group: Any = self._gloo if way == "gloo" else self._sync[1]
        posts = []
        for peer, num_bytes in receives.items():
            posts += [(group.recv, piece, peer) for piece in self._pieces(f"from {peer}", num_bytes)]
        for peer, num_bytes in sends.items():
            posts += [(group.send, piece, peer) for piece in self._pieces(f"to {peer}", num_bytes)]
        waiting = [post([piece] if way == "gloo" else piece, peer, 0) for post, piece, peer in posts]
        if local:
            self._buffer("local target", local).copy_(self._buffer("local source", local))
        for pending in waiting:
            pending.wait()
        return sum(receives.values())

    def _pieces(self, name: str, num_bytes: int) -> Sequence[Tensor]:
        return self._buffer(name, num_bytes).split(SYNC_BUCKET_BYTES)

    def _buffer(self, name: str, num_bytes: int) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = torch.ones(num_bytes, dtype=torch.uint8)
        return self._buffers[name]


def _products(kind: str, x: Tensor, w: Tensor, dy: Tensor) -> list[Callable[[], Tensor]]:
    if kind == "torch.mm":
        return [lambda: torch.mm(x, w.t()), lambda: torch.mm(dy, w), lambda: torch.mm(dy.t(), x)]
    if kind == "nereus":
        return [lambda: product(x, w), lambda: product(dy, w.t()), lambda: product(dy.t(), x.t())]
    # What is packed must be a weight, so the weight's own gradient has no packed product.
    assert kind == "packed", kind
    forward, backward = make_product(w, None, packed=True), make_product(w.t().contiguous(), None, packed=True)
    return [lambda: forward(x), lambda: backward(dy)]


def _time(call: Callable[[], Tensor]) -> float:
    """Return the median seconds of a call, after one to warm up."""
    call()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < _PRODUCT_S and len(seconds) < 50):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


class CountingRank(Rank):
    """A worker that counts what its communicators note."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._calls, add = 0, context.spending.add

        def count(name: str, seconds: float, num_bytes: int) -> None:
            self._calls += 1
            add(name, seconds, num_bytes)

        context.spending.add = count  # type: ignore[method-assign]

    def take_calls(self) -> int:
        """Return how many calls were noted since this was asked last."""
        taken, self._calls = self._calls, 0
        return taken
