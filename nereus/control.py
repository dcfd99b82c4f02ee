"""What people tell a running job: RUN_DIR/control/, numbered files of which the newest says all that holds.

Each is created whole by whoever takes its number, so that two who speak at once are heard one after the other.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import yaml

from nereus.config import build_config
from nereus.supply import Controls, describe_deadline
from storage.errors import describe_error, hide_credentials
from storage.exclusive import create_exclusively
from storage.retry import as_os_error, retried
from storage.small_files import list_names, read_file, remove_files
from storage.urls import join_url, local_path
from storage.writable import describe_access

LIMIT_S = 2.0  # for a look at a boundary
_NAME = re.compile(r"[0-9]{8}\.json")
_KEPT = 16  # newest files; older ones say nothing any more
_LATEST = 2.0**36  # epoch seconds, some thousand years on
_log = logging.getLogger(__name__)


def read_controls(run_dir: str, known: Controls | None = None) -> Controls:
    """Return what people have told a job; takes one listing, and one small file if there is news.

    Args:
        run_dir: of the job, a path or any fsspec URL.
        known: what was read before.

    Raises:
        OSError: the store doesn't answer.
        ValueError: the newest file is damaged; one sentence with the mend.
    """
    folder = _folder(run_dir)
    names = [name for name in list_names(folder) if _NAME.fullmatch(name)]
    if not names:
        return Controls()
    if known is not None and names[-1] == _name(known.number):
        return known
    try:
        return _parse(json.loads(read_file(join_url(folder, names[-1]))), int(names[-1][:8]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"control/{names[-1]} is damaged ({describe_error(error)}); remove it and give the command again."
        ) from None


def read_num_devices(run_dir: str) -> int:
    """Return the devices of a run's cluster, by its run.yaml.

    Raises:
        ValueError: there is no run, or it can't be read; one sentence with the mend.
    """
    where = hide_credentials(run_dir)
    try:
        place = join_url(run_dir.rstrip("/"), "run.yaml")
        text = retried(lambda: read_file(place, patient=False), attempts=2).decode()  # somebody waits
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"RUN_DIR {where} holds no run (there is no run.yaml in it); give the directory of a run."
        ) from None
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"RUN_DIR {where} can't be read {describe_access(error)}.") from None
    try:
        return build_config(yaml.safe_load(text) or {}).cluster.devices
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise ValueError(
            f"run.yaml in RUN_DIR {where} is none of this version ({describe_error(error)}); use the one that wrote it."
        ) from None


def tell_scale(run_dir: str, num_devices: int) -> Controls:
    """Tell a job that devices 0..num_devices-1 are there, and return what it is told in all.

    Raises:
        ValueError: the run directory can't be read or written; one sentence with the mend.
    """

    def scale(told: Controls) -> Controls:
        number = told.number + 1
        drains = {device: deadline for device, deadline in told.drains.items() if device >= num_devices}
        return Controls(number, num_devices, number, drains)

    return _tell(run_dir, scale)


def tell_drain(run_dir: str, device: int, deadline: float | None) -> Controls:
    """Tell a job that a device will go, and return what it is told in all.

    Args:
        deadline: epoch seconds when it goes; None where that isn't known.

    Raises:
        ValueError: the device is drained already, and not any later; or as `tell_scale`.
    """

    def drain(told: Controls) -> Controls:
        if device in told.drains and _when(deadline) >= _when(told.drains[device]):
            raise ValueError(
                f"DEVICE {device} is drained already{describe_deadline(told.drains[device])}; only an earlier "
                "--deadline is news, and `nereus scale` brings it back."
            )
        return Controls(told.number + 1, told.scale, told.scale_number, {**told.drains, device: deadline})

    return _tell(run_dir, drain)


class ControlReader:
    """The controls of a job as its driver reads them at every boundary: in bounded time, from any store."""

    def __init__(self, run_dir: str, *, limit_s: float = LIMIT_S) -> None:
        """Read nothing yet.

        Args:
            run_dir: of the job.
            limit_s: longest time for a look. What comes later counts at the next one.
        """
        self._run_dir = run_dir
        self._limit_s = limit_s
        self._known = Controls()
        self._look: threading.Thread | None = None
        self._in_trouble = False

    def read(self) -> Controls:
        """Return what people have told the job; what was known before where the store doesn't answer in time."""
        if self._look is None:
            # No pool: a process that ends doesn't wait for this thread.
            self._look = threading.Thread(target=self._read, name="nereus-control", daemon=True)
            self._look.start()
        self._look.join(self._limit_s)
        if self._look.is_alive():
            self._warn(f"no answer within {self._limit_s:g} s")
        else:
            self._look = None
        return self._known

    def _read(self) -> None:
        try:
            self._known = read_controls(self._run_dir, self._known)
            self._in_trouble = False
        except Exception as error:  # every store has errors of its own, and a job goes on without news
            self._warn(describe_error(as_os_error(error)))

    def _warn(self, why: str) -> None:
        if not self._in_trouble:
            _log.warning("control/ can't be read, what it said before still counts: %s", why)
        self._in_trouble = True


def _tell(run_dir: str, change: Callable[[Controls], Controls]) -> Controls:
    folder = _folder(run_dir)
    try:
        while True:
            controls = change(read_controls(run_dir))
            name = _name(controls.number)
            try:
                create_exclusively(join_url(folder, name), json.dumps(_to_record(controls)).encode())
                break
            except FileExistsError:
                if name not in list_names(folder):  # the folder is what is in the way
                    raise
        remove_files([join_url(folder, name) for name in list_names(folder) if _is_old(name, controls.number)])
        return controls
    except ValueError:
        raise
    except Exception as error:  # every store has errors of its own
        raise ValueError(f"{hide_credentials(folder)} can't be written {_describe_access(folder, error)}.") from None


def _describe_access(folder: str, error: Exception) -> str:
    """Return `(WHAT); MEND`; another place, as at the door of a run, is no choice here."""
    if local_path(folder) is None:
        return describe_access(error)
    return f"({describe_error(error)}); make it a directory that you may write to"


def _is_old(name: str, newest: int) -> bool:
    return _NAME.fullmatch(name) is not None and int(name[:8]) <= newest - _KEPT


def _folder(run_dir: str) -> str:
    return join_url(run_dir.rstrip("/"), "control")


def _name(number: int) -> str:
    return f"{number:08d}.json"


def _when(deadline: float | None) -> float:
    return math.inf if deadline is None else deadline


def _to_record(controls: Controls) -> dict[str, Any]:
    return {
        "scale": controls.scale,
        "scale_number": controls.scale_number,
        "drains": {str(device): deadline for device, deadline in sorted(controls.drains.items())},
        "written_at": round(time.time(), 3),  # for people
    }


def _parse(record: dict[str, Any], number: int) -> Controls:
    """Return the controls of a file; whatever is no such record raises."""
    scale, scale_number = record["scale"], int(record["scale_number"])
    drains = {int(device): None if end is None else float(end) for device, end in record["drains"].items()}
    if not all(0 <= end <= _LATEST for end in drains.values() if end is not None):
        raise ValueError("a deadline makes no sense")
    return Controls(number, None if scale is None else int(scale), scale_number, drains)
