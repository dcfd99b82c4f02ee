"""The tensors of one rank of a unit, by canonical names: made and freed chunk by chunk, without model or links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nereus.layout import Layout
from nereus.model.decoder import DecoderShard, ShardView
from nereus.model.spec import ModelSpec, tensors
from nereus.staged_state import PREFIXES, base_name, grid
from nereus.transition.chunks import Chunk
from storage.checksums import PieceHash
from storage.slices import TensorSlice

_MODULUS = 2**64


@dataclass(frozen=True)
class _Seat:
    """A rank without peers: enough to know the shapes of its parameters."""

    rank: int
    size: int


class HeldTensors:
    """What one rank holds, `tensors[prefix][parameter]`: under "" masters (training) or parameters, else moments."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, rank: int, *, trains: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Describe the tensors; none is made yet.

        Args:
            trains: whether there are moments.
            dtype: of all tensors.
        """
        self.spec, self.layout, self.rank, self.dtype, self.device = spec, layout, rank, dtype, device
        seat = _Seat(layout.tp_rank(rank), layout.tp)
        skeleton = DecoderShard(spec, layout, rank, group=seat, dtype=dtype, device="meta")  # type: ignore[arg-type]
        self.shapes = {name: tuple(parameter.shape) for name, parameter in skeleton.named_parameters()}
        self._views: dict[str, list[ShardView]] = {}
        self._chunk_of: dict[str, Chunk] = {}
        for view in skeleton.views():
            self._views.setdefault(view.slice.name, []).append(view)
            self._chunk_of[view.parameter] = tensors(spec)[view.slice.name].place  # type: ignore[assignment]
        self.tensors: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in (PREFIXES if trains else ("",))}

    def make(self, chunk: Chunk | None = None) -> None:
        """Allocate the tensors of a chunk, all of them without one."""
        for name in self._names(chunk):
            for held in self.tensors.values():
                held[name] = torch.empty(self.shapes[name], dtype=self.dtype, device=self.device)

    def free(self, chunk: Chunk | None = None) -> None:
        """Let go of the tensors of a chunk, of all without one."""
        for name in self._names(chunk):
            for held in self.tensors.values():
                held.pop(name, None)

    def take(self, other: HeldTensors) -> None:
        """Hold the very tensors of another rank."""
        self.tensors = {prefix: dict(held) for prefix, held in other.tensors.items()}

    def _names(self, chunk: Chunk | None) -> list[str]:
        return [name for name in self.shapes if chunk is None or self._chunk_of[name] == chunk]

    def find(self, part: TensorSlice) -> Tensor:
        """Return a view of exactly `part` (its name may have a prefix), which this rank must hold."""
        name = base_name(part.name)
        plain, held = replace(part, name=name), self.tensors[part.name.removesuffix(name)]
        for view in self._views.get(name, ()):
            if view.slice.intersect(plain) == plain:
                return view.of(held[view.parameter])[plain.within(view.slice)]
        raise AssertionError(f"{part} is not held here")

    @torch.no_grad()
    def sums(self) -> dict[str, int]:
        """Return by tensor the sum mod 2^64 of the checksums of the pieces that are held here."""
        return {name: sum(numbers) % _MODULUS for name, numbers in self._piece_sums()}

    def _piece_sums(self) -> Iterator[tuple[str, list[int]]]:
        for prefix in self.tensors:
            for name, views in self._views.items():
                info = tensors(self.spec)[name]
                pieces = [
                    replace(piece, name=prefix + name)
                    for piece in grid(info, self.spec.kv_heads)
                    if piece.num_elements and any(view.slice.intersect(piece) == piece for view in views)
                ]
                yield prefix + name, [self._hash(piece, info.shape) for piece in pieces]

    def _hash(self, piece: TensorSlice, shape: tuple[int, ...]) -> int:
        digest = PieceHash(piece, shape)
        flat = self.find(piece).contiguous().view(-1).view(torch.uint8)
        digest.update(flat.cpu().numpy().data)
        return int(digest.hexdigest(), 16)


def prefixed(part: TensorSlice, prefixes: Mapping[str, object]) -> Iterator[TensorSlice]:
    """Yield a slice under all its names: of the parameter and of its moments."""
    for prefix in prefixes:
        yield replace(part, name=prefix + part.name)
