"""A primitive while the graph is being built, and the edges that stand for memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nereus.emu import Emu
from nereus.transition.primitives import Kind, Primitive, Reservation, Transport


@dataclass
class Draft:
    """A primitive that isn't final; `depends_on` has each id once, in the order in which edges were found."""

    kind: Kind
    model_stage: str
    id: str = ""
    reads: tuple[Emu, ...] = ()
    makes: tuple[Emu, ...] = ()
    frees: tuple[Emu, ...] = ()
    shares: tuple[int, ...] = ()
    streams: tuple[str, ...] = ()
    transport: Transport = "none"
    depends_on: dict[str, None] = field(default_factory=dict)
    resource_edges: tuple[str, ...] = ()
    bytes: int = 0
    memory: dict[int, Reservation] = field(default_factory=dict)
    after_commit: bool = False

    def final(self) -> Primitive:
        units = (*self.reads, *self.makes, *self.frees)
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
            depends_on=tuple(self.depends_on),
            resource_edges=self.resource_edges,
            bytes=self.bytes,
            devices=tuple(sorted({device for unit in units for device in unit.devices})),
            memory=self.memory,
            after_commit=self.after_commit,
        )


def add_resource_edges(drafts: Iterable[Draft], free_bytes: Mapping[int, int]) -> None:
    """Let every primitive wait for those whose memory it takes over.

    A reservation draws on bytes that are free at the start, or that earlier primitives have given back: of buffers when
    they end, of old units when they are destroyed. Each byte is drawn once until it is given back again, so whoever has
    waited for those that it draws on finds its memory, in whatever order all others run.

    Args:
        drafts: in a serial order in which every reservation fits.
        free_bytes: by device, at the start.
    """
    drafts = [draft for draft in drafts if draft.memory]
    demand: dict[int, int] = {}
    for draft in drafts:
        for device, (peak, _) in draft.memory.items():
            demand[device] = demand.get(device, 0) + peak
    # Where all reservations together fit into what is free, nobody ever waits.
    pools = {device: _Pool(free_bytes[device]) for device, total in demand.items() if total > free_bytes[device]}
    if not pools:
        return
    for draft in drafts:
        own = [(pools[device], need) for device, need in draft.memory.items() if device in pools]
        edges: dict[str, None] = {}
        for pool, (peak, _) in own:
            pool.draw(peak, {**draft.depends_on, **edges}, edges)
        draft.resource_edges = tuple(edge for edge in edges if edge not in draft.depends_on)
        draft.depends_on.update(edges)
        for pool, (peak, held) in own:
            if peak > held:
                pool.give(draft.id, peak - held)


class _Pool:
    """The bytes of one device that nobody holds: those free from the start, and by id those that primitives gave back.

    `free` is negative where more is held at the start than is allowed; the first bytes given back make up for it.
    """

    def __init__(self, free: int) -> None:
        self.free = free
        self.given: dict[str, int] = {}

    def give(self, source: str, amount: int) -> None:
        if self.free < 0:
            paid = min(amount, -self.free)
            self.free += paid
            amount -= paid
        if amount:
            self.given[source] = amount

    def draw(self, amount: int, known: Mapping[str, None], edges: dict[str, None]) -> None:
        """Take bytes: first those free from the start, then those of primitives waited for anyway, then the oldest."""
        taken = max(0, min(amount, self.free))
        self.free -= taken
        amount -= taken
        if not amount:
            return
        for source in [*(id for id in self.given if id in known), *self.given]:
            if amount and source in self.given:
                taken = min(amount, self.given[source])
                amount -= taken
                edges[source] = None
                if taken == self.given[source]:
                    del self.given[source]
                else:
                    self.given[source] -= taken
        assert not amount, "the serial order has room for every reservation"
