"""What can be told to a running job: `nereus scale` and `nereus drain`."""

import math
import time
from typing import Annotated

import typer

from nereus.cli.exits import wrong_input_exits
from nereus.cli.root import RunDirArgument, app

# Click would take -1 for an option; we say what is wrong with it ourselves.
_NUMBERS = {"ignore_unknown_options": True}
_LONGEST_S = 10**9


@app.command(context_settings=_NUMBERS)
def scale(
    run_dir: RunDirArgument,
    devices: Annotated[str, typer.Argument(metavar="N", help="How many devices there are: ids 0 to N-1.")],
) -> None:
    """Tell a running job how many devices there are from its next step on; with 0 it ends, to be resumed."""
    from nereus.control import read_num_devices, tell_scale

    with wrong_input_exits():
        total = read_num_devices(run_dir)
        count = _parse_whole(devices, "N")
        if not 0 <= count <= total:
            raise ValueError(
                f"N is {count}, but cluster.devices of this run is {total}; give a number from 0 to {total}."
            )
        tell_scale(run_dir, count)
    if count == 0:
        typer.echo("the job is told that no device is left; it ends after the step in hand")
    else:
        which = "device 0 is" if count == 1 else f"devices 0 to {count - 1} are"
        typer.echo(f"the job is told that {which} there; it hears so before its next step")


@app.command(context_settings=_NUMBERS)
def drain(
    run_dir: RunDirArgument,
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="Id of the device that will go.")],
    deadline: Annotated[
        str | None, typer.Option(metavar="S", help="Seconds from now until it goes; default: not known.")
    ] = None,
) -> None:
    """Tell a running job that a device will go; it stays away until a later `nereus scale` covers it."""
    from nereus.control import read_num_devices, tell_drain
    from nereus.supply import describe_deadline

    with wrong_input_exits():
        total = read_num_devices(run_dir)
        chosen = _parse_whole(device, "DEVICE")
        if not 0 <= chosen < total:
            ids = "the only one is 0" if total == 1 else f"they are 0 to {total - 1}"
            raise ValueError(f"DEVICE is {chosen}, which is no device of this run; {ids}.")
        end = None if deadline is None else time.time() + _parse_seconds(deadline)
        tell_drain(run_dir, chosen, end)
    typer.echo(f"the job is told to leave device {chosen}{describe_deadline(end)}; it hears so before its next step")


def _parse_whole(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}, which is no whole number.") from None


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _LONGEST_S:
        raise ValueError(f"--deadline is {text!r}; give a number of seconds from now, 0 or more.")
    return seconds
