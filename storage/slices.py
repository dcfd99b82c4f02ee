"""A named rectangular part of a tensor: the coordinate in which all rooms speak of bytes."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator
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
        assert min(self.starts + self.sizes, default=0) >= 0, self

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.starts, self.sizes))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def intersect(self, other: TensorSlice) -> TensorSlice | None:
        """Return the common part of two slices of one tensor, or None when they share no element."""
        if self.name != other.name:
            return None
        assert len(self.starts) == len(other.starts), (self, other)
        # One call a dimension would be most of the time that a reader needs for a small piece.
        starts = tuple(map(max, self.starts, other.starts))
        sizes = tuple(map(operator.sub, map(min, self.stops, other.stops), starts))
        return TensorSlice(self.name, starts, sizes) if min(sizes, default=1) > 0 else None

    def within(self, outer: TensorSlice) -> tuple[slice, ...]:
        """Return the index that picks this slice out of a tensor that holds exactly `outer`."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.starts, self.sizes, outer.starts, strict=True)
        )

    def blocks(self, max_elements: int) -> Iterator[TensorSlice]:
        """Yield slices of at most `max_elements` that, their elements laid end to end, are this one in row-major order.

        Example: rows 0..4 of a [5, 3] matrix in blocks of 6 elements are rows 0..1, 2..3 and 4; in blocks of 2 they
        are columns 0..1 and 2 of each row.
        """
        assert max_elements > 0, max_elements
        if self.num_elements <= max_elements:
            yield self
            return
        # The first dimension of which one index fits into a block is cut in runs, those before it index by index.
        dim = next(d for d in range(len(self.sizes)) if math.prod(self.sizes[d + 1 :]) <= max_elements)
        step = max_elements // math.prod(self.sizes[dim + 1 :])
        for index in itertools.product(*(range(n) for n in self.sizes[:dim])):
            for first in range(0, self.sizes[dim], step):
                size = min(step, self.sizes[dim] - first)
                yield TensorSlice(
                    self.name,
                    (
                        *(start + i for start, i in zip(self.starts, index, strict=False)),
                        self.starts[dim] + first,
                        *self.starts[dim + 1 :],
                    ),
                    (*(1 for _ in index), size, *self.sizes[dim + 1 :]),
                )


def whole(name: str, shape: tuple[int, ...]) -> TensorSlice:
    """Return the slice that covers a tensor of `shape` completely."""
    return TensorSlice(name, (0,) * len(shape), tuple(shape))
