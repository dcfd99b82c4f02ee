"""Weights from actor.training to actor.generation, for any pair of layouts: few large messages, versioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from nereus.layout import Copy, plan_copies
from nereus.limits import SYNC_BUCKET_BYTES
from nereus.model.decoder import ShardView
from nereus.model.spec import ModelSpec
from nereus.plan import StagePlan
from nereus.runtime.communicator import Communicator
from nereus.runtime.slice_transfer import Slices, plan_exchange, run_exchange
from nereus.runtime.transition_orders import BuildOrder
from nereus.runtime.worker import WorkerContext
from storage.slices import TensorSlice


@lru_cache(maxsize=8)
def sync_copies(spec: ModelSpec, training: StagePlan, generation: StagePlan) -> tuple[Copy, ...]:
    """Return the copies of one weight sync; every device computes the same list."""
    return tuple(plan_copies(spec, training.layout, training.replicas, generation.layout, generation.replicas))


class SliceStore:
    """Finds the memory of a part of a canonical tensor among a rank's parameters, or tensors shaped like them."""

    def __init__(self, views: Sequence[ShardView], tensors: Mapping[str, Tensor]) -> None:
        self._views = {view.slice.name: view for view in views}
        self._tensors = tensors

    def find(self, part: TensorSlice) -> Tensor:
        """Return a view of exactly `part`, which this rank must hold."""
        return self.find_at(part.name, part.starts, part.sizes)

    def find_at(self, name: str, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return the same for a slice by its parts; thousands are asked for in the midst of a transition."""
        view = self._views.get(name)
        assert view is not None, f"{name} is not held here"
        held, found = view.slice, self._tensors[view.parameter]
        for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            base = start - held.starts[dim]
            assert base >= 0 and base + size <= held.sizes[dim], f"{name} at {starts}, {sizes} is not held here"
            offset = view.start if dim == 0 else 0  # a view is some rows of a parameter
            if size != found.shape[dim]:
                found = found.narrow(dim, offset + base, size)
        return found


class WeightSync:
    """One device's part of each weight sync."""

    def __init__(
        self,
        copies: Sequence[Copy],
        devices: Sequence[int],
        device: int,
        *,
        dtype: torch.dtype,
    ) -> None:
        """Settle what this device keeps, sends and receives; `devices` are in the order of the communicator's ranks."""
        self.dtype = dtype
        self._exchange = plan_exchange(copies, devices, device, most_elements=SYNC_BUCKET_BYTES // dtype.itemsize)

    @property
    def received_bytes(self) -> int:
        return self._exchange.received_elements * self.dtype.itemsize

    def run(self, source: Slices | None, target: Slices | None, communicator: Communicator) -> None:
        """Copy everything; no buffer is left behind."""
        run_exchange(self._exchange, source, target, communicator, self.dtype)
        communicator.trim()


def connect_weight_sync(
    context: WorkerContext, order: BuildOrder, epoch: int, training: StagePlan, generation: StagePlan
) -> tuple[WeightSync, Communicator]:
    """Connect the devices that exchange the actor's weights and settle what each sends.

    Args:
        order: by which either of the two model-stages was, or will be, built here.
    """
    devices = tuple(sorted({*training.devices, *generation.devices}))
    communicator = Communicator.connect(
        store_address=context.store_address,
        name="weight_sync",
        epoch=epoch,
        rank=devices.index(context.device),
        size=len(devices),
        torch_device=context.torch_device,
        abort=context.abort,
    )
    communicator.count_into(context.spending, "weight_sync")
    copies = sync_copies(order.source.spec, training, generation)
    return WeightSync(copies, devices, context.device, dtype=order.dtype), communicator
