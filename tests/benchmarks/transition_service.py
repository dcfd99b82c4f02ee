"""A worker that changes its layout as in a run, and moves as many bytes between prepared buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from nereus.runtime.communicator import Communicator
from nereus.runtime.worker import WorkerContext
from tests.benchmarks.staged_service import StagedRank

# The fastest of 4, 8, 16 and 32 MiB, and of 1 to 8 rounds, here.
MESSAGE_BYTES = 16 << 20
ROUNDS_IN_FLIGHT = 2
_connect = Communicator.connect


class MovingRank(StagedRank):
    """Holds a training model-stage whose numbers are known."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._raw: dict[str, Any] = {}
        self._buffers: dict[str, Tensor] = {}

    def choose_links(self, shared_memory: bool) -> None:
        """Make all communicators from now on as on one host, or as between hosts."""

        def connect(**arguments: Any) -> Communicator:
            return _connect(**{**arguments, "same_host": arguments.get("same_host", True) and shared_memory})

        Communicator.connect = connect  # type: ignore[method-assign]

    def connect_raw(self, devices: Sequence[int], epoch: int) -> None:
        """Join the groups of `exchange`."""
        rank, size = devices.index(self.context.device), len(devices)
        for way in ("shared memory", "sockets"):
            self._raw[way] = _connect(
                store_address=self.context.store_address,
                name=f"raw/{way}",
                epoch=epoch,
                rank=rank,
                size=size,
                torch_device=self.context.torch_device,
                abort=self.context.abort,
                same_host=way == "shared memory",
            )
        client = distributed.TCPStore(*self.context.store_address, is_master=False, wait_for_workers=False)
        store = distributed.PrefixStore(f"raw/gloo/{epoch}", client)
        self._raw["gloo"] = distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))

    def exchange(self, way: str, sends: Mapping[int, int], receives: Mapping[int, int], local: int) -> int:
        """Copy `local` bytes, send and receive these numbers of bytes by rank; return what was received.

        Args:
            way: "shared memory" or "sockets" (our communicators), or "gloo" (torch.distributed's process group).
        """
        if local:
            self._buffer("local target", local).copy_(self._buffer("local source", local))
        group, wrap = self._raw[way], (lambda piece: [piece]) if way == "gloo" else (lambda piece: piece)
        pieces_in = {peer: self._pieces(f"from {peer}", num_bytes) for peer, num_bytes in receives.items()}
        pieces_out = {peer: self._pieces(f"to {peer}", num_bytes) for peer, num_bytes in sends.items()}
        rounds = max((len(pieces) for pieces in (*pieces_in.values(), *pieces_out.values())), default=0)
        in_flight: list[list[Any]] = []
        for index in range(rounds):
            posted = [group.recv(wrap(p[index]), peer, 0) for peer, p in pieces_in.items() if index < len(p)]
            posted += [group.send(wrap(p[index]), peer, 0) for peer, p in pieces_out.items() if index < len(p)]
            in_flight.append(posted)
            if len(in_flight) >= ROUNDS_IN_FLIGHT:
                _wait(in_flight.pop(0))
        for posted in in_flight:
            _wait(posted)
        return sum(receives.values())

    def _pieces(self, name: str, num_bytes: int) -> Sequence[Tensor]:
        return self._buffer(name, num_bytes).split(MESSAGE_BYTES)

    def _buffer(self, name: str, num_bytes: int) -> Tensor:
        if name not in self._buffers or self._buffers[name].numel() < num_bytes:
            self._buffers[name] = torch.ones(num_bytes, dtype=torch.uint8)
        return self._buffers[name][:num_bytes]


def _wait(transfers: Sequence[Any]) -> None:
    for transfer in transfers:
        transfer.wait()
