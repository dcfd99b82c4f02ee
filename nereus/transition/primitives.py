"""What a transition is made of: primitives on Elastic Model Units, and the graph of the orders they may run in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from nereus.emu import Emu
from nereus.plan import Plan

Kind = Literal["stage", "split", "destroy", "extend", "restore", "merge", "reshard", "move"]
Transport = Literal["direct", "staged", "none"]
# How a job may move; auto: by whichever is faster and fits.
TransportChoice = Literal["auto", "direct", "staged"]

# The local order of one model-stage's primitives; what comes last in a chain of conversions makes the target's units.
KINDS: tuple[Kind, ...] = ("stage", "split", "destroy", "extend", "restore", "move", "reshard", "merge")
# Send and receive buckets of one device while one primitive moves bytes over links, each way.
TRANSFER_BUFFER_BYTES = 32 << 20


class Reservation(NamedTuple):
    """Bytes of one device. `peak` is needed from the start of a primitive to its end, above what is held when it
    starts, buffers included; `held` (negative where more is freed than made) is the change that stays after it."""

    peak: int
    held: int


@dataclass(frozen=True)
class Primitive:
    """One step of a transition. It may start when all of `depends_on` have ended, and then never waits for memory.

    Units of the old and the new plan are told apart by (model_stage, layout, devices): equal ones are one unit, kept.

    Attributes:
        id: unique in the graph, such as "actor.training/reshard/0".
        reads: live units of one model-stage and layout whose slices it copies: old ones, or new ones that an earlier
            primitive made (copies spread like a rumour). Of actor.training where it fills actor.generation from there.
            A `restore` takes from them only what already lies on the same device, all else from the staged set or the
            model's source. A `stage` writes what they hold; without bytes, a pending commit already does.
        makes: units of the target plan that exist when it has ended.
        frees: old units that no longer exist when it has ended. For `destroy` that is all it does. Any other kind
            then works in place: chunk by chunk, in the order of `chunks.chunk_order`, it makes the new tensors of a
            chunk, fills them, and frees the old ones of the chunk once all their readers have them.
        shares: devices on which a new unit takes over the tensors of an old one of its model-stage as they are (same
            layout, same rank): no memory, no copy; destroying the old unit later leaves these tensors alone.
        streams: stages whose set it reads while it is written: they must have started before it starts, and it ends
            after they have.
        transport: "none" where nothing travels.
        depends_on: ids of state edges and resource edges; `resource_edges` are those among them that only stand for
            memory.
        bytes: between devices, or to or from storage.
        devices: all that take part, ascending.
        memory: by device; devices it leaves out need nothing.
        after_commit: whether it waits for the commit record: it frees what was kept of the old plan.
    """

    id: str
    kind: Kind
    model_stage: str
    reads: tuple[Emu, ...] = ()
    makes: tuple[Emu, ...] = ()
    frees: tuple[Emu, ...] = ()
    shares: tuple[int, ...] = ()
    streams: tuple[str, ...] = ()
    transport: Transport = "none"
    depends_on: tuple[str, ...] = ()
    resource_edges: tuple[str, ...] = ()
    bytes: int = 0
    devices: tuple[int, ...] = ()
    memory: Mapping[int, Reservation] = field(default_factory=dict, hash=False)
    after_commit: bool = False

    @property
    def in_place(self) -> bool:
        """Whether it frees old tensors while it makes new ones."""
        return bool(self.frees) and self.kind != "destroy"


@dataclass(frozen=True)
class TransitionGraph:
    """All primitives from one plan to another, in a serial order that respects every edge.

    Attributes:
        target: with the devices of each model-stage in the rank order that moves fewest bytes; the plan in force after
            the commit.
        kept: units that both plans have; nothing touches them.
        free_bytes: by device, what may be used at the start: the cap less all that is held.
        recoverable: model-stages whose state is also in a committed set, or at a source from which it can be read
            again, before anything moves.
        live: whole units at the start, where they aren't those of `current`: a graph that leads back starts between
            two plans.
        lost: devices of `current` whose memory is gone; those that the target names are there again, empty.
    """

    current: Plan
    target: Plan
    primitives: tuple[Primitive, ...]
    kept: tuple[Emu, ...] = ()
    free_bytes: Mapping[int, int] = field(default_factory=dict, hash=False)
    recoverable: frozenset[str] = frozenset()
    live: tuple[Emu, ...] | None = None
    lost: frozenset[int] = frozenset()

    @cached_property
    def by_id(self) -> Mapping[str, Primitive]:
        return {primitive.id: primitive for primitive in self.primitives}

    @property
    def bytes(self) -> int:
        """Bytes that travel, on both transports."""
        return sum(primitive.bytes for primitive in self.primitives)

    def validate(self) -> None:
        """Raise AssertionError where a promise of the graph is broken, see `nereus.transition.walk.check_graph`."""
        from nereus.transition.walk import check_graph

        check_graph(self)
