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
from nereus.runtime.pages import new_tensors
from nereus.runtime.unit_sums import sum_pieces
from nereus.runtime.weight_sync import SliceStore
from nereus.staged_state import PREFIXES, base_name
from nereus.transition.chunks import Chunk
from storage.slices import TensorSlice


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
        for names in self._names_by_chunk(chunk):  # those of a chunk lie together: they are freed together
            wanted = {(prefix, name): shapes[name] for prefix in self.tensors for name in names}
            for (prefix, name), tensor in new_tensors(wanted, self.dtype, self.device).items():
                self.tensors[prefix][name] = tensor

    def free(self, chunk: Chunk | None = None) -> None:
        """Let go of the tensors of a chunk, or of all; a unit that has taken them over keeps them."""
        self.drop_weights()
        for held in self.tensors.values():
            for names in self._names_by_chunk(chunk):
                for name in names:
                    held.pop(name, None)

    def take_over(self, other: HeldTensors) -> None:
        """Hold the very tensors of an equal rank of another unit."""
        assert (self.layout, self.rank, self.dtype) == (other.layout, other.rank, other.dtype)
        for prefix, held in other.tensors.items():
            self.tensors[prefix].update(held)
        self._weights = dict(other._weights)

    def _names_by_chunk(self, chunk: Chunk | None) -> Iterable[tuple[str, ...]]:
        """Return the parameters of a chunk, or of each."""
        by_chunk = _parameters_by_chunk(self.spec, self.layout, self.rank)
        return by_chunk.values() if chunk is None else [by_chunk.get(chunk, ())]

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
        return self._stores[part.name.removesuffix(name)].find_at(name, part.starts, part.sizes)

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
            masters = self.tensors[""]
            for names in self._names_by_chunk(None):
                shapes = {name: tuple(masters[name].shape) for name in names}
                for name, weight in new_tensors(shapes, self.compute_dtype, self.device).items():
                    self._weights[name] = weight.copy_(masters[name])
        return self._weights

    def drop_weights(self) -> None:
        """Free the copies that `weights` has made; a unit that has taken them over keeps them."""
        self._weights = {}

    # Checksums

    def sums(self) -> dict[str, int]:
        """Return by name in staged state the sum mod 2^64 of the checksums of the pieces that are held here."""
        return sum_pieces(self.tensors, self.spec, self.layout, self.rank)


def held_dtype(compute_dtype: torch.dtype, *, trains: bool) -> torch.dtype:
    """Return the dtype of what a rank holds: masters and moments are in at least float32."""
    return torch.promote_types(compute_dtype, torch.float32) if trains else compute_dtype


def named(part: TensorSlice, prefixes: Iterable[str]) -> Iterator[TensorSlice]:
    """Yield a slice under its name with each prefix."""
    for prefix in prefixes:
        yield TensorSlice(prefix + part.name, part.starts, part.sizes) if prefix else part
