"""A named rectangular part of a tensor: the coordinate in which all rooms speak of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class TensorSlice:
    """Elements `[starts, starts + sizes)` of the canonical tensor `name`.

    Example: rows 192..383 of a [576, 576] matrix are `TensorSlice("w", (192, 0), (192, 576))`.
    A scalar has empty `starts` and `sizes`; a slice with a size of 0 holds nothing and is legal.
    """

    name: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.starts) == len(self.sizes), self
        assert all(s >= 0 for s in (*self.starts, *self.sizes)), self

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Return the common part of two slices of one tensor, or None when they share no element."""
        if self.name != other.name:
            return None
        starts = tuple(max(a, b) for a, b in zip(self.starts, other.starts, strict=True))
        stops = tuple(min(a, b) for a, b in zip(self.stops, other.stops, strict=True))
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return TensorSlice(self.name, starts, tuple(b - a for a, b in zip(starts, stops, strict=True)))

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Return the index that picks this slice out of a tensor that holds exactly `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.starts, self.sizes, outer.starts, strict=True)
        )


def whole(name: str, shape: tuple[int, ...]) -> TensorSlice:
    """Return the slice that covers a tensor of `shape` completely."""
    return TensorSlice(name, (0,) * len(shape), tuple(shape))
