"""What is planned for the first of some twins, laid out on all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from nereus.emu import Emu
from nereus.transition.primitives import Primitive, Reservation
from nereus.transition.twins import Twins


class Stencil:
    """Knows which places the first ones' devices and units have, and what the copies are called."""

    def __init__(self, all_twins: Sequence[Twins]) -> None:
        self._twins_of = {device: twins for twins in all_twins for device in twins[0].devices}
        self._device_at = {device: at for twins in all_twins for at, device in enumerate(twins[0].devices)}
        self._unit_at = {id(unit): at for twins in all_twins for at, unit in enumerate(twins[0].units)}
        self._most = max(map(len, all_twins))
        self._counts: dict[str, int] = {}
        self._ids: dict[str, list[str]] = {}  # of the copies, by the first one's

    def copies(self, primitive: Primitive) -> Iterable[Primitive]:
        """Return a primitive of a first one on all its twins; what it depends on was laid out before.

        What a model-stage does once, the writing of its state and the freeing after the commit, it still does once.
        """
        if primitive.kind == "stage" or primitive.after_commit:
            ids = self._new_ids(primitive, 1)
            self._ids[primitive.id] = ids * self._most
            return [self._on_all(primitive, ids[0])]
        twins = self._twins_of[(*primitive.makes, *primitive.frees)[0].devices[0]]
        self._ids[primitive.id] = self._new_ids(primitive, len(twins))
        return self._on_each(primitive, twins)

    def _new_ids(self, primitive: Primitive, count: int) -> list[str]:
        name = f"{primitive.model_stage}/{primitive.kind}"
        start = self._counts.get(name, 0)
        self._counts[name] = start + count
        return [f"{name}/{number}" for number in range(start, start + count)]

    def _on_each(self, primitive: Primitive, twins: Twins) -> Iterable[Primitive]:
        reads, makes, frees = (
            [self._unit_at[id(unit)] for unit in units] for units in (primitive.reads, primitive.makes, primitive.frees)
        )
        shares, devices, reserves = (
            [self._device_at[device] for device in there]
            for there in (primitive.shares, primitive.devices, primitive.memory)
        )
        depends_on, resource_edges, streams = (
            [self._ids[id] for id in ids] for ids in (primitive.depends_on, primitive.resource_edges, primitive.streams)
        )
        reservations = tuple(primitive.memory.values())
        for number, (part, id_) in enumerate(zip(twins, self._ids[primitive.id], strict=True)):
            unit, device = part.units.__getitem__, part.devices.__getitem__
            yield Primitive(
                id=id_,
                kind=primitive.kind,
                model_stage=primitive.model_stage,
                reads=tuple(map(unit, reads)),
                makes=tuple(map(unit, makes)),
                frees=tuple(map(unit, frees)),
                shares=tuple(map(device, shares)),
                streams=tuple([ids[number] for ids in streams]),
                transport=primitive.transport,
                depends_on=tuple([ids[number] for ids in depends_on]),
                resource_edges=tuple([ids[number] for ids in resource_edges]),
                bytes=primitive.bytes,
                devices=tuple(sorted(map(device, devices))),
                memory=dict(zip(map(device, reserves), reservations, strict=True)),
            )

    def _on_all(self, primitive: Primitive, id: str) -> Primitive:
        memory: dict[int, Reservation] = {}
        for device, reservation in primitive.memory.items():
            memory.update(dict.fromkeys(self._devices_on_all([device]), reservation))
        return replace(
            primitive,
            id=id,
            reads=self.units_on_all(primitive.reads),
            frees=self.units_on_all(primitive.frees),
            devices=tuple(sorted(self._devices_on_all(primitive.devices))),
            memory=memory,
        )

    def units_on_all(self, units: Iterable[Emu]) -> tuple[Emu, ...]:
        """Return units of the first ones, and those that stand for them on their twins, in the order of replicas."""
        places = [(self._twins_of[unit.devices[0]], self._unit_at[id(unit)]) for unit in units]
        return tuple(sorted([part.units[at] for twins, at in places for part in twins], key=_replica))

    def _devices_on_all(self, devices: Iterable[int]) -> list[int]:
        places = [(self._twins_of[device], self._device_at[device]) for device in devices]
        return [part.devices[at] for twins, at in places for part in twins]


def _replica(unit: Emu) -> int:
    return unit.replica
