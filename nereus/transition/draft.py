"""A primitive while the graph is being built."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from nereus.emu import Emu
from nereus.transition.primitives import Kind, Primitive, Reservation, Transport


@dataclass
class Draft:
    """A primitive that isn't final; `depends_on` has each id once, in the order in which edges were found.

    `takes_over` are old units that it doesn't read, but on whose devices it shares tensors.
    """

    kind: Kind
    model_stage: str
    id: str = ""
    reads: tuple[Emu, ...] = ()
    makes: tuple[Emu, ...] = ()
    frees: tuple[Emu, ...] = ()
    shares: tuple[int, ...] = ()
    takes_over: tuple[Emu, ...] = ()
    streams: tuple[str, ...] = ()
    transport: Transport = "none"
    depends_on: dict[str, None] = field(default_factory=dict)
    bytes: int = 0
    memory: dict[int, Reservation] = field(default_factory=dict)
    after_commit: bool = False

    def final(self, resource_edges: Sequence[str] = (), lost: Collection[int] = ()) -> Primitive:
        """Return the primitive, which also waits for `resource_edges`; nothing is left on `lost` devices."""
        devices = set[int]().union(*(unit.devices for unit in self.frees)).difference(lost)
        devices.update(*(unit.devices for unit in (*self.reads, *self.makes)))
        return Primitive(
            id=self.id,
            kind=self.kind,
            model_stage=self.model_stage,
            reads=self.reads,
            makes=self.makes,
            frees=self.frees,
            shares=self.shares,
            streams=self.streams,
            transport=self.transport,
            depends_on=(*self.depends_on, *resource_edges),
            resource_edges=tuple(resource_edges),
            bytes=self.bytes,
            devices=tuple(sorted(devices)),
            memory=self.memory,
            after_commit=self.after_commit,
        )
