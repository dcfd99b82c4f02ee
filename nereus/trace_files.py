"""Device traces from where they lie: in the config, in a file, or in the folder that NEREUS_TRACES names."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from nereus.config import DeviceFile, DeviceTrace, resolve_path
from nereus.traces import Pool, read_devices_csv, read_spot_trace, sample_pools
from storage.errors import hide_credentials, refuse_credentials
from storage.small_files import read_file
from storage.writable import describe_access

TRACES_VARIABLE = "NEREUS_TRACES"
_FIELD = "drift.devices"


def find_trace(name: str) -> tuple[str, str] | None:
    """Return where a trace lies and where that is in words: as it is named, or in the folder of traces; else None."""
    folder = os.environ.get(TRACES_VARIABLE)
    if "://" in name or os.path.isfile(name):
        return resolve_path(name), hide_credentials(name)
    inside = os.path.join(folder or "", name)
    return (inside, f"{name} of {TRACES_VARIABLE}") if folder and os.path.isfile(inside) else None


def describe_missing(name: str, field: str) -> str:
    """Return the sentence about a trace that `find_trace` didn't find; `field` names it in the config."""
    folder = os.environ.get(TRACES_VARIABLE)
    where = f"nor in {TRACES_VARIABLE}={folder}" if folder else f"and {TRACES_VARIABLE} isn't set"
    return f"{field} is {name!r}, which is not here {where}; give the path of a trace."


def read_pools(place: str, sampling: DeviceFile, num_steps: int) -> tuple[Pool, ...]:
    """Return the devices of every step from a CSV `seconds,available` or a JSON of skypilot-org/spot-traces.

    Raises:
        ValueError: it can't be read, or makes no sense.
    """
    name, text = os.path.basename(place), read_text(place)
    read = read_spot_trace if place.endswith(".json") else read_devices_csv
    return sample_pools(
        read(text, name), num_steps, name,
        scale=sampling.scale, least=sampling.min, most=sampling.max, span_s=sampling.span_s,
    )  # fmt: skip


def read_text(place: str) -> str:
    """Return the text of a trace.

    Raises:
        ValueError: it can't be read.
    """
    try:
        return read_file(place).decode()
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"trace {hide_credentials(place)} can't be read {describe_access(error)}.") from None


def read_device_trace(
    devices: DeviceTrace | DeviceFile | str | None, *, num_steps: int, num_devices: int
) -> DeviceTrace:
    """Return the trace of a run as [step, devices] entries where the number changes; none where there is no trace.

    Args:
        devices: `drift.devices` of a config.
        num_steps: of the run; a trace in seconds is spread over them.
        num_devices: of the cluster.

    Raises:
        ValueError: the file is missing or makes no sense, or asks for more devices than there are.
    """
    if devices is None or isinstance(devices, tuple):
        return _changes(devices or ())
    file = DeviceFile(file=devices) if isinstance(devices, str) else devices
    refuse_credentials(file.file, _FIELD)
    found = find_trace(file.file)
    if found is None:
        raise ValueError(describe_missing(file.file, _FIELD))
    try:
        pools = read_pools(found[0], file, num_steps)
    except ValueError as error:
        raise ValueError(f"{_FIELD}: {error}") from None
    trace = _changes([(step, pool.num_devices) for step, pool in enumerate(pools)])
    for step, count in trace:
        if count > num_devices:
            raise ValueError(
                f"{_FIELD}: {found[1]} has {count} devices at step {step}, but cluster.devices is {num_devices}; raise "
                f"it, or cut them with {_FIELD}={{file: {file.file}, max: {num_devices}}}."
            )
    return trace


def _changes(entries: Sequence[tuple[int, int]]) -> DeviceTrace:
    before = itertools.chain([None], (count for _, count in entries))
    return tuple(entry for entry, count in zip(entries, before, strict=False) if entry[1] != count)
