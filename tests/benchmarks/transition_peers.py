"""Another way from one layout to another: torch.distributed.checkpoint, saved by the old ranks, loaded by the new ones.

Run by `tests.benchmarks.staged_peers` as the kind "moves", in two processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RANKS = 2
# Of 1, 2 and 4 the fastest here, by a few percent; its default is 1. No difference where files need no syncing.
THREADS = 2


class MovingPeer:
    """One rank, which holds its tensors of several layouts.

    Spec: `tensors` {name: [shape, dimension that tp splits, or null]}, `layouts` {layout: [by rank, how it holds each
    name: "whole" or "split"]}, `store` a file where the ranks meet.
    """

    def __init__(self, rank: int, spec: Mapping[str, Any]) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh

        distributed.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=RANKS)
        self._mesh = init_device_mesh("cpu", (RANKS,))
        self._rank, self._shapes = rank, spec["tensors"]
        self._states = {
            layout: {name: self._make(name, how) for name, how in by_rank[rank].items()}
            for layout, by_rank in spec["layouts"].items()
        }

    def _make(self, name: str, how: str) -> Any:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        from tests.benchmarks.staged_service import whole_tensor

        shape, dim = self._shapes[name]
        tensor = whole_tensor(name, tuple(shape))
        if how == "whole":
            return tensor
        local = tensor if dim is None else tensor.chunk(RANKS, dim)[self._rank].contiguous().clone()
        placement = Replicate() if dim is None else Shard(dim)
        return DTensor.from_local(
            local, self._mesh, [placement], run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def wait(self) -> None:
        """Be ready."""

    def save(self, layout: str, folder: str, threads: int = THREADS) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._states[layout], storage_writer=dcp.FileSystemWriter(folder, thread_count=threads))

    def load(self, layout: str, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._states[layout], checkpoint_id=folder)

    def spoil(self, layout: str) -> None:
        for tensor in self._states[layout].values():
            _local(tensor).fill_(0)

    def check(self, layout: str) -> None:
        """Raise if something that was loaded is not what was saved."""
        for name, tensor in self._states[layout].items():
            expected = _local(self._make(name, "split" if hasattr(tensor, "to_local") else "whole"))
            assert _local(tensor).equal(expected), name


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
