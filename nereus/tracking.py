"""Feeds accelerate's trackers with the metrics of a run, without an Accelerator."""

import logging
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel

from storage.errors import describe_error

logger = logging.getLogger(__name__)


class Trackers:
    """The open trackers of one run; a context manager.

    A tracker is a view: what the run itself needs is in its metrics file, so none of them is asked for anything, and
    one that fails is warned of once.
    """

    def __init__(self, trackers: Sequence[Any]):
        self._trackers = tuple(trackers)
        self._failed: set[str] = set()

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the numbers of one metrics line; nested ones as `seconds/training`, texts and lists not at all."""
        if self._trackers:
            numbers = flatten_numbers(metrics)
            for tracker in self._trackers:
                try:
                    tracker.log(numbers, step=step)
                except Exception as error:
                    self._warn(tracker, error)

    def close(self) -> None:
        """Flush and close all trackers; more calls do nothing."""
        trackers, self._trackers = self._trackers, ()
        for tracker in trackers:
            try:
                tracker.finish()
            except Exception as error:
                self._warn(tracker, error)

    def _warn(self, tracker: Any, error: Exception) -> None:
        if tracker.name not in self._failed:
            self._failed.add(tracker.name)
            logger.warning("The tracker %s failed (%s); the run goes on.", tracker.name, describe_error(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError when the package of a named tracker isn't installed."""
    if not names:
        return
    from accelerate.tracking import get_available_trackers

    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in installed:
            raise ValueError(f"tracking: `{name}` is not installed; run `pip install {name}` or take it off the list.")


def open_trackers(names: Sequence[str], run_dir: str, config: BaseModel) -> Trackers:
    """Start the named trackers of accelerate.

    Args:
        names: `tensorboard`, `wandb`.
        run_dir: of the run; its last part is the run's name. TensorBoard writes to `run_dir`/tensorboard, local or not.
        config: the resolved run config, stored as the run's settings.

    Raises:
        ValueError: a tracker's package isn't installed.
    """
    if not names:
        return Trackers(())
    # accelerate's decorators ask this process' place in the world; without a launcher that is "the only one".
    from accelerate.state import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    check_trackers(names)
    PartialState(cpu=True)
    run_name = os.path.basename(run_dir.rstrip("/"))
    settings = flatten_settings(config.model_dump(mode="json"))
    trackers = []
    for name in names:
        where = {"logging_dir": run_dir} if name == "tensorboard" else {}
        tracker = LOGGER_TYPE_TO_CLASS[name](name if where else run_name, **where)
        tracker.start()
        tracker.store_init_configuration(settings)
        trackers.append(tracker)
    return Trackers(trackers)


def flatten_numbers(tree: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a tree by slashed path: {"seconds": {"total": 2}} gives {"seconds/total": 2}."""
    numbers: dict[str, float] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            numbers |= flatten_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{prefix}{key}"] = value
    return numbers


def flatten_settings(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Return the leaves of a tree by dotted path; what is no plain value becomes text."""
    settings: dict[str, str | int | float | bool] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            settings |= flatten_settings(value, f"{prefix}{key}.")
        else:
            settings[f"{prefix}{key}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return settings
