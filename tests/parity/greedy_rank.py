"""A rank that can be told to use up its worker's memory, or to spoil what it holds."""

import mmap

import torch

from tests.runtime.open_rank import OpenRank

_MOST_BYTES, _LEAST_BYTES = 64 << 20, 16 << 10
# Left for what it takes to say that memory ran out.
_SPARE_BLOCKS = 8


class GreedyRank(OpenRank):
    """Holds what it grabs until its process ends."""

    def hog(self) -> int:
        """Map private memory until the system refuses, then fill the heap's holes; return the bytes that are held."""
        self._mapped: list[mmap.mmap] = []
        size = _MOST_BYTES
        while size >= _LEAST_BYTES:
            try:
                self._mapped.append(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
            except OSError:
                size //= 2
        self._blocks: list[bytearray] = []
        try:
            while True:
                self._blocks.append(bytearray(_LEAST_BYTES))
        except MemoryError:
            del self._blocks[-_SPARE_BLOCKS:]
        return sum(map(len, self._mapped)) + sum(map(len, self._blocks))

    @torch.no_grad()
    def spoil(self) -> None:
        """Change the weights that generate, as a copy that went wrong would."""
        for parameter in self.units["actor.generation"].shard.parameters():
            parameter.mul_(1.01)
