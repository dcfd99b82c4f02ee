"""Edges that stand for memory: whoever takes over bytes waits for those that give them back, and never in a circle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from nereus.transition.primitives import Reservation


class Reserving(Protocol):
    """A primitive, or a draft of one."""

    @property
    def id(self) -> str: ...

    @property
    def depends_on(self) -> Iterable[str]: ...

    @property
    def memory(self) -> Mapping[int, Reservation]: ...


def find_resource_edges(serial: Iterable[Reserving], free_bytes: Mapping[int, int]) -> dict[str, list[str]]:
    """Return by id whom a primitive waits for because of memory alone; those that needn't are left out.

    A reservation draws on bytes that are free at the start, or that earlier primitives have given back: of buffers when
    they end, of old units when they are destroyed. Each byte is drawn once until it is given back again, so whoever has
    waited for those that it draws on finds its memory, in whatever order all others run.

    Args:
        serial: in an order in which every reservation fits; `depends_on` are the state edges.
        free_bytes: by device, at the start.
    """
    serial = [reserving for reserving in serial if reserving.memory]
    demand: dict[int, int] = {}
    for reserving in serial:
        for device, (peak, _) in reserving.memory.items():
            demand[device] = demand.get(device, 0) + peak
    # Where all reservations together fit into what is free, nobody ever waits.
    pools = {device: _Pool(free_bytes[device]) for device, total in demand.items() if total > free_bytes[device]}
    found: dict[str, list[str]] = {}
    for reserving in serial if pools else ():
        own = [(pools[device], *bytes_of) for device, bytes_of in reserving.memory.items() if device in pools]
        known, edges = set(reserving.depends_on), list[str]()
        for pool, peak, _ in own:
            if peak > pool.free and (more := pool.must_wait_for(peak, known)):
                edges += more
                known.update(more)
        if edges:
            found[reserving.id] = edges
        for pool, peak, held in own:
            if peak:
                pool.draw(peak, known)
            if peak > held:
                pool.give(reserving.id, peak - held)
    return found


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

    def must_wait_for(self, amount: int, known: set[str]) -> list[str]:
        """Return who else must be waited for, the oldest first, by one that asks for bytes and waits for `known`."""
        if self.free > 0:
            amount -= self.free
        for source in known.intersection(self.given):
            amount -= self.given[source]
        more: list[str] = []
        if amount <= 0:
            return more
        for source, given in self.given.items():
            if source not in known:
                more.append(source)
                amount -= given
                if amount <= 0:
                    return more
        raise AssertionError("the serial order has room for every reservation")

    def draw(self, amount: int, known: set[str]) -> None:
        """Take bytes of those waited for anyway; what is free from the start is left to those who needn't wait."""
        given = self.given
        if given and not known.isdisjoint(given):
            for source in [source for source in given if source in known]:
                left = given[source] - amount
                if left > 0:
                    given[source] = left
                    return
                del given[source]
                amount = -left
        self.free -= amount
