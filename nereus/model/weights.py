"""Where a shard's weights come from: a checkpoint on disk, or random numbers; always slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from nereus.model.checkpoint import has_value_head, locate_tensors
from nereus.model.spec import ModelSpec, tensors
from nereus.random import normal_slice
from storage.safetensors_file import SafetensorsFile
from storage.slices import TensorSlice

if TYPE_CHECKING:
    from nereus.model.decoder import DecoderShard

_DRAW_ELEMENTS = 2**20  # drawn at a time: 8 MiB of float64


class WeightSource(Protocol):
    """Gives any slice of any tensor of one model."""

    spec: ModelSpec

    def read(self, part: TensorSlice, out: Tensor) -> None:
        """Fill `out` (shape `part.sizes`, any float dtype and device) with that slice of the canonical tensor."""

    def close(self) -> None:
        """Close the files that are open."""


class CheckpointSource:
    """A Hugging Face checkpoint, of which only the bytes asked for are read."""

    def __init__(self, path: str, spec: ModelSpec) -> None:
        """Find every tensor by the files' headers.

        Raises:
            ValueError: the checkpoint doesn't hold the spec's tensors (see `locate_tensors`).
        """
        self.path, self.spec = path, spec
        self._places = locate_tensors(path, spec)
        self._files: dict[str, SafetensorsFile] = {}

    def read(self, part: TensorSlice, out: Tensor) -> None:
        place = self._places[part.name]
        if place.url not in self._files:
            self._files[place.url] = SafetensorsFile(place.url)
        self._files[place.url].read(TensorSlice(place.entry.name, part.starts, part.sizes), out)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors fetched so far."""
        return sum(file.bytes_read for file in self._files.values())

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()


class RandomSource:
    """A freshly initialised model: every slice can be drawn again, on any layout, from (seed, role, tensor name).

    Weights are normal with the spec's initializer_range, norms are 1, biases 0.
    """

    def __init__(self, spec: ModelSpec, seed: int, role: str) -> None:
        self.spec, self.seed, self.role = spec, seed, role

    def read(self, part: TensorSlice, out: Tensor) -> None:
        assert tuple(out.shape) == part.sizes, (tuple(out.shape), part)
        if part.name.endswith(".bias"):
            out.zero_()
        elif part.name.endswith("norm.weight"):
            out.fill_(1.0)
        else:
            self._draw(part, out)

    def _draw(self, part: TensorSlice, out: Tensor) -> None:
        shape = tensors(self.spec)[part.name].shape
        columns = tuple(slice(start, stop) for start, stop in zip(part.starts[1:], part.stops[1:], strict=True))
        step = max(1, _DRAW_ELEMENTS // max(1, *shape[1:]))
        first, last = part.starts[0], part.stops[0]
        for start in range(first, last, step):
            stop = min(start + step, last)
            drawn = normal_slice(self.seed, self.role, part.name, shape, start, stop, self.spec.initializer_range)
            out[start - first : stop - first].copy_(torch.from_numpy(drawn)[(slice(None), *columns)])

    def close(self) -> None:
        """Nothing is open."""


class FreshHead:
    """The backbone of another source with a newly drawn value or score head."""

    def __init__(self, base: WeightSource, spec: ModelSpec, seed: int, role: str) -> None:
        assert spec.head in ("value", "score"), spec.head
        self.base, self.spec = base, spec
        self._head = RandomSource(spec, seed, role)

    def read(self, part: TensorSlice, out: Tensor) -> None:
        is_head = part.name in ("value_head.weight", "score.weight")
        (self._head if is_head else self.base).read(part, out)

    def close(self) -> None:
        self.base.close()


def open_weights(path: str, spec: ModelSpec, *, seed: int, role: str) -> WeightSource:
    """Return a checkpoint's weights, with a newly drawn value head where the spec wants one and the files have none.

    Raises:
        ValueError: as `CheckpointSource`; a missing score head is an error, for a random reward is none.
    """
    if spec.head == "value" and not has_value_head(path):
        backbone = replace(spec, head="lm", tie_embeddings=True)  # a language model without a head of its own
        return FreshHead(CheckpointSource(path, backbone), spec, seed, role)
    return CheckpointSource(path, spec)


def load_shard(shard: DecoderShard, source: WeightSource, targets: Mapping[str, Tensor] | None = None) -> None:
    """Fill all parameters of a shard from a source, one slice at a time.

    Args:
        targets: tensors to fill instead, by parameter name and shaped like the parameters (a trainer's masters).
    """
    tensors_by_name = dict(shard.named_parameters()) if targets is None else targets
    with torch.no_grad():
        for view in shard.views():
            source.read(view.slice, view.of(tensors_by_name[view.parameter]))
    shard.drop_prepared()  # packed copies of the former weights must not survive
