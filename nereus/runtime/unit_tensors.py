"""The tensors of one rank of a unit, by canonical names: made and freed chunk by chunk, without model or links."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from nereus.layout import Layout
from nereus.model.decoder import shard_views
from nereus.model.spec import ModelSpec, tensors
from nereus.model.weights import WeightSource
from nereus.runtime.weight_sync import SliceStore
from nereus.staged_state import PREFIXES, base_name, grid
from nereus.transition.chunks import Chunk
from storage.checksums import PieceHash
from storage.slices import TensorSlice

_MODULUS = 2**64
# What doesn't lie in one piece is hashed through copies of this size, which stay in the cache.
_HASH_BLOCK_BYTES = 1 << 20


@lru_cache(maxsize=1024)
def parameter_shapes(spec: ModelSpec, layout: Layout, rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a rank's parameters by name, those of the model's modules."""
    rows: dict[str, int] = {}
    rest: dict[str, tuple[int, ...]] = {}
    for view in shard_views(spec, layout, rank):
        rows[view.parameter] = rows.get(view.parameter, 0) + view.rows
        rest[view.parameter] = view.slice.sizes[1:]
    return {name: (count, *rest[name]) for name, count in rows.items()}


@lru_cache(maxsize=1024)
def _parameters_by_chunk(spec: ModelSpec, layout: Layout, rank: int) -> dict[Chunk, tuple[str, ...]]:
    """Return which parameters a rank has in each chunk; none spans two, fused ones included."""
    found: dict[Chunk, dict[str, None]] = {}
    for view in shard_views(spec, layout, rank):
        found.setdefault(tensors(spec)[view.slice.name].place, {})[view.parameter] = None
    return {chunk: tuple(names) for chunk, names in found.items()}


class HeldTensors:
    """What one rank of a unit holds, raw: a model is formed over it, and others are filled from it.

    Attributes:
        tensors: by prefix ("": masters of a training model-stage, parameters of others; moments by their names in
            staged state), then by parameter.
        dtype, compute_dtype: of these tensors, and of the weights that forward passes use.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        *,
        trains: bool,
        compute_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Describe the tensors; none is made yet.

        Args:
            trains: whether there are moments, and masters in at least float32.
        """
        self.spec, self.layout, self.rank, self.device = spec, layout, rank, device
        self.compute_dtype = compute_dtype
        self.dtype = held_dtype(compute_dtype, trains=trains)
        self.tensors: dict[str, dict[str, Tensor]] = {prefix: {} for prefix in (PREFIXES if trains else ("",))}
        self._weights: dict[str, Tensor] = {}
        views = shard_views(spec, layout, rank)
        self._stores = {prefix: SliceStore(views, held) for prefix, held in self.tensors.items()}
        self._slices = {view.slice.name: view.slice for view in views}

    def make(self, chunk: Chunk | None = None) -> None:
        """Allocate the tensors of a chunk, or all of them; their content is arbitrary."""
        shapes = parameter_shapes(self.spec, self.layout, self.rank)
        for held in self.tensors.values():
            for name in self._names(chunk):
                held[name] = torch.empty(shapes[name], dtype=self.dtype, device=self.device)

    def free(self, chunk: Chunk | None = None) -> None:
        """Let go of the tensors of a chunk, or of all; a unit that has taken them over keeps them."""
        self.drop_weights()
        for held in self.tensors.values():
            for name in self._names(chunk):
                held.pop(name, None)

    def take_over(self, other: HeldTensors) -> None:
        """Hold the very tensors of an equal rank of another unit."""
        assert (self.layout, self.rank, self.dtype) == (other.layout, other.rank, other.dtype)
        for prefix, held in other.tensors.items():
            self.tensors[prefix].update(held)
        self._weights = dict(other._weights)

    def _names(self, chunk: Chunk | None) -> tuple[str, ...]:
        by_chunk = _parameters_by_chunk(self.spec, self.layout, self.rank)
        if chunk is not None:
            return by_chunk.get(chunk, ())
        return tuple(name for names in by_chunk.values() for name in names)

    # Content

    def holds(self, part: TensorSlice) -> bool:
        """Return whether a slice (its name may have a prefix) belongs to this rank and is there."""
        name = base_name(part.name)
        held, whole = self.tensors.get(part.name.removesuffix(name)), self._slices.get(name)
        plain = replace(part, name=name)
        return bool(held) and whole is not None and whole.intersect(plain) == plain

    def find(self, part: TensorSlice) -> Tensor:
        """Return a view of exactly `part`, whose name may have a prefix; this rank must hold it."""
        name = base_name(part.name)
        return self._stores[part.name.removesuffix(name)].find(TensorSlice(name, part.starts, part.sizes))

    @torch.no_grad()
    def fill(self, source: WeightSource) -> None:
        """Read the parameters, or masters, from where the model comes from; moments become 0."""
        for part in self._slices.values():
            source.read(part, self.find(part))
        self.zero_moments()

    @torch.no_grad()
    def zero_moments(self) -> None:
        """Begin with moments as they are before the first update."""
        for prefix, held in self.tensors.items():
            for tensor in held.values() if prefix else ():
                tensor.zero_()

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """Return the weights of forward passes: the very parameters, or copies in `compute_dtype` that live as long."""
        if self.dtype == self.compute_dtype:
            return self.tensors[""]
        if not self._weights:
            self._weights = {name: tensor.to(self.compute_dtype) for name, tensor in self.tensors[""].items()}
        return self._weights

    def drop_weights(self) -> None:
        """Free the copies that `weights` has made; a unit that has taken them over keeps them."""
        self._weights = {}

    # Checksums

    @torch.no_grad()
    def sums(self) -> dict[str, int]:
        """Return by name in staged state the sum mod 2^64 of the checksums of the pieces that are held here."""
        return {
            prefix + name: sum(self._hash(prefix, piece) for piece in self._pieces(name)) % _MODULUS
            for prefix in self.tensors
            for name in self._slices
        }

    def _pieces(self, name: str) -> Iterator[TensorSlice]:
        whole = self._slices[name]
        for piece in grid(tensors(self.spec)[name], self.spec.kv_heads):
            common = piece.intersect(whole)
            if common is not None:
                assert common == piece, f"{piece} is cut by {whole}"
                yield piece

    def _hash(self, prefix: str, piece: TensorSlice) -> int:
        digest = PieceHash(replace(piece, name=prefix + piece.name), tensors(self.spec)[piece.name].shape)
        live = self._stores[prefix].find(piece)
        whole = replace(piece, starts=(0,) * len(piece.starts))
        lies_in_one = live.is_contiguous() and live.device.type == "cpu"
        for block in [whole] if lies_in_one else whole.blocks(_HASH_BLOCK_BYTES // self.dtype.itemsize):
            part = live[block.within(whole)].contiguous().cpu()
            digest.update(memoryview(part.view(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
        return int(digest.hexdigest(), 16)


def held_dtype(compute_dtype: torch.dtype, *, trains: bool) -> torch.dtype:
    """Return the dtype of what a rank holds: masters and moments are in at least float32."""
    return torch.promote_types(compute_dtype, torch.float32) if trains else compute_dtype


def named(part: TensorSlice, prefixes: Iterable[str]) -> Iterator[TensorSlice]:
    """Yield a slice under its name with each prefix."""
    for prefix in prefixes:
        yield TensorSlice(prefix + part.name, part.starts, part.sizes) if prefix else part
