"""A worker whose training model-stage holds numbers that are known, so that what is read back can be checked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nereus.runtime.rank import Rank
from nereus.runtime.worker import peak_rss_bytes, reset_peak_rss, rss_bytes
from nereus.staged_state import staged_shapes, wanted_slices
from storage.slices import TensorSlice


class StagedRank(Rank):
    """Writes and reads staged state as in a run."""

    def fill(self, model_stage: str) -> int:
        """Fill parameters and moments with the numbers of `whole_tensor`; return the bytes of all."""
        with torch.no_grad():
            return sum(live.copy_(expect()).nbytes for live, expect in self._tensors(model_stage))

    def spoil(self, model_stage: str) -> None:
        """Overwrite all that `fill` writes."""
        with torch.no_grad():
            for live, _ in self._tensors(model_stage):
                live.fill_(torch.nan)

    def count_differing(self, model_stage: str) -> int:
        """Return how many elements are not those that `fill` writes."""
        with torch.no_grad():
            return sum(int(live.ne(expect()).sum()) for live, expect in self._tensors(model_stage))

    def mark_memory(self) -> None:
        """Begin to measure what is held beside the tensors of now."""
        reset_peak_rss()
        self._marked_bytes = rss_bytes()

    def peak_bytes(self) -> int:
        """Return the most bytes held beside the tensors since `mark_memory`."""
        return peak_rss_bytes() - self._marked_bytes

    def _tensors(self, model_stage: str) -> Iterator[tuple[Tensor, Callable[[], Tensor]]]:
        """Yield each staged tensor with what returns the numbers that belong there."""
        staged = self.units[model_stage].staged
        assert staged is not None
        shapes = staged_shapes(staged.spec)
        for part in wanted_slices(staged.spec, staged.shard.layout, staged.shard.rank):
            yield staged.find(part), partial(_expected, part, shapes[part.name])


def _expected(part: TensorSlice, shape: tuple[int, ...]) -> Tensor:
    return _cut(whole_tensor(part.name, shape), part)


def whole_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the float32 numbers that a tensor of that name holds: another series for each name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(shape, generator=generator)


def _cut(tensor: Tensor, part: TensorSlice) -> Tensor:
    return tensor[tuple(slice(start, start + size) for start, size in zip(part.starts, part.sizes, strict=True))]
