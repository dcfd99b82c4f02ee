"""The communicators of one rank of a model-stage: inside its replica, along TP, and across replicas."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from nereus.layout import Layout
from nereus.plan import StagePlan
from nereus.runtime.communicator import Communicator
from nereus.runtime.worker import WorkerContext


@dataclass(frozen=True)
class Links:
    """`replica` spans the tp * pp ranks of one replica (rank = stage * tp + tp_rank), `tp` those of one pipeline stage,
    `dp` the replicas' ranks that hold the same slices."""

    layout: Layout
    rank: int
    replica: Communicator
    tp: Communicator
    dp: Communicator

    @property
    def stage(self) -> int:
        return self.layout.stage(self.rank)

    @property
    def tp_rank(self) -> int:
        return self.layout.tp_rank(self.rank)

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.layout.pp - 1

    @property
    def previous(self) -> int:
        """The replica rank one pipeline stage before, with the same tp rank."""
        return self.rank - self.layout.tp

    @property
    def next(self) -> int:
        return self.rank + self.layout.tp

    def release_slots(self) -> None:
        """Give the memory of large sums back to the system at the end of a stage; all ranks call it."""
        self.tp.release_slots()
        self.dp.release_slots()

    def close(self) -> None:
        for communicator in (self.dp, self.tp, self.replica):
            communicator.close()


def connect_links(context: WorkerContext, model_stage: str, plan: StagePlan, epoch: int) -> tuple[int, Links]:
    """Connect this device's communicators of a model-stage; return its replica index and links.

    All ranks connect in the order replica, tp, dp, and each set of ranks enters a connection together, so no rank
    waits for one that waits for it. Where one fails, none stays open.
    """
    position = plan.devices.index(context.device)
    replica, rank = divmod(position, plan.layout.size)
    stage, tp_rank = plan.layout.stage(rank), plan.layout.tp_rank(rank)

    with ExitStack() as undo:

        def connect(name: str, rank: int, size: int, operation_class: str | None = None) -> Communicator:
            communicator = Communicator.connect(
                store_address=context.store_address,
                name=f"{model_stage}/{name}",
                epoch=epoch,
                rank=rank,
                size=size,
                torch_device=context.torch_device,
                abort=context.abort,
            )
            undo.callback(communicator.close)
            communicator.count_into(context.spending, operation_class)
            return communicator

        links = Links(
            layout=plan.layout,
            rank=rank,
            # Sums over a replica are of single numbers, and wait for the pipeline as its messages do.
            replica=connect(f"replica{replica}", rank, plan.layout.size, "p2p"),
            tp=connect(f"replica{replica}/stage{stage}", tp_rank, plan.layout.tp),
            dp=connect(f"rank{rank}", replica, plan.dp, "dp_sync"),
        )
        undo.pop_all()
    return replica, links
