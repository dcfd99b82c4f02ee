"""New memory for the tensors of a unit: those that come and go together lie together, in huge pages where there are.

The first touch of a page is what new memory costs: 1.8 GB/s with a fault for each 4 KiB, 7 with one for each 2 MiB
(copies into it included). A huge page must not reach beyond what was asked for, or more memory is taken than predicted.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K")

_HUGE_BYTES = 2 << 20
# Less than this comes from the allocator: a mapping is rounded up, and an allocator uses memory again.
_LEAST_BYTES = 2 * _HUGE_BYTES
# What processors load at once, and torch aligns its own tensors to.
_ALIGNMENT_BYTES = 64


def new_tensors(shapes: Mapping[K, tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> dict[K, Tensor]:
    """Return tensors of these shapes with arbitrary content; their memory is freed when the last one is gone.

    Raises:
        OSError: the system refuses the memory (ENOMEM); or RuntimeError, from torch's allocator.
    """
    starts, end = [], 0
    for shape in shapes.values():
        starts.append(end)
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    if device.type != "cpu" or end < _LEAST_BYTES:
        return {key: torch.empty(shape, dtype=dtype, device=device) for key, shape in shapes.items()}
    data = _map(end)
    return {
        key: data[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for (key, shape), start in zip(shapes.items(), starts, strict=True)
    }


def _map(num_bytes: int) -> Tensor:
    """Return private memory that no allocator keeps when it is freed."""
    # Linux lays a mapping of whole huge pages on their bounds; the last one is for small pages, as far as it is needed.
    whole_bytes = num_bytes // _HUGE_BYTES * _HUGE_BYTES
    memory = mmap.mmap(-1, whole_bytes + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise_huge(memory, whole_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes)


def advise_huge(memory: mmap.mmap, num_bytes: int) -> None:
    """Ask for huge pages at the beginning of a mapping; without them all works the same, slower."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE, 0, num_bytes)
    except (AttributeError, OSError):  # another system, or a kernel without them
        return
