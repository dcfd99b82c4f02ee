"""The bytes of tensors, row-major: seen in place where they lie that way, else copied block by block."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from storage.slices import whole


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    # Not reshape(-1): a dimension of one element may have any stride, and would keep it.
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def lies_in_order(tensor: Tensor) -> bool:
    """Return whether `bytes_of` shows the tensor's own memory."""
    return tensor.is_cpu and tensor.is_contiguous()


def copy_elements(target: Tensor, source: Tensor) -> None:
    """Copy one tensor's elements into another of the same shape, whatever their dtypes, strides and devices."""
    if target.dtype == source.dtype and _has_whole_rows(target) and _has_whole_rows(source):
        # By rows of bytes: a third faster than torch's copy of strided tensors, on the machines here.
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source)


def _has_whole_rows(tensor: Tensor) -> bool:
    return tensor.is_cpu and tensor.dim() > 0 and tensor.stride(-1) == 1


def byte_blocks(tensor: Tensor, buffer: Tensor) -> Iterator[memoryview]:
    """Yield all bytes of a tensor, row-major, in blocks of at most the buffer's size.

    A tensor that lies in order is not copied; a strided one, or one on another device, goes through `buffer` (uint8,
    CPU, at least 8 bytes), so a block is only valid until the next one is taken.
    """
    tensor = tensor.detach()
    limit = buffer.numel()
    if lies_in_order(tensor):
        data = bytes_of(tensor)
        yield from (data[start : start + limit] for start in range(0, len(data), limit))
        return
    everything = whole("", tuple(tensor.shape))
    for part in everything.blocks(limit // tensor.element_size()):
        block = buffer[: part.num_elements * tensor.element_size()]
        copy_elements(block.view(tensor.dtype).view(part.sizes), tensor[part.within(everything)])
        yield bytes_of(block)
