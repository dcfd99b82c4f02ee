"""From scenario names, YAML files and `key=value` overrides to one checked Scenario with its traces read."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from nereus.config.parts import ConfigError
from nereus.simulator.scenario import Scenario, TraceFile
from nereus.trace_files import TRACES_VARIABLE, describe_missing, find_trace, read_pools, read_text
from nereus.traces import LengthTrace, Pool, build_lengths, build_pools, read_lengths_csv

SCENARIOS_DIR = Path(__file__).resolve().parent.parent / "recipes" / "scenarios"


@dataclass(frozen=True)
class Traces:
    """The traces of a scenario by step; `source` says in words where the devices come from."""

    pools: tuple[Pool, ...]
    lengths: LengthTrace
    source: str


def list_scenarios() -> list[str]:
    """Return the names of the scenarios shipped in the package."""
    return sorted(file.stem for file in SCENARIOS_DIR.glob("*.yaml"))


def load_scenario(name_or_path: str, overrides: Iterable[str] = ()) -> Scenario:
    """Return a shipped scenario or a YAML file's with dotted `key=value` overrides applied.

    Raises:
        ConfigError: no such scenario or file, no YAML, an unknown key, or a value out of bounds.
    """
    tree = _read_tree(name_or_path)
    for override in overrides:
        _apply_override(tree, override)
    try:
        return Scenario.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from None


def load_traces(scenario: Scenario, num_devices: int) -> Traces:
    """Return the pool and the lengths of every step.

    Args:
        num_devices: devices of the whole allocation.

    Raises:
        ValueError: a trace is missing or makes no sense, or asks for more devices than there are.
    """
    devices, source = scenario.devices, "as written in the scenario"
    if devices is None:
        pools: tuple[Pool, ...] = (Pool(num_devices),) * scenario.steps
    elif isinstance(devices, TraceFile):
        place, source = _find_trace(devices)
        pools = read_pools(place, devices, scenario.steps)
    else:
        pools = build_pools(devices, scenario.steps, "devices")
    most = max(pool.num_devices for pool in pools)
    if most > num_devices:
        raise ValueError(
            f"the trace asks for {most} devices, but cluster.devices is {num_devices}; raise it or set devices.max."
        )
    lengths = scenario.workload.response_tokens
    where = "workload.response_tokens"
    if isinstance(lengths, str):
        place, _ = find_trace(lengths) or (lengths, "")
        points: Any = read_lengths_csv(read_text(place), lengths)
    else:
        points = [[0, lengths]] if isinstance(lengths, float | int) else lengths
    return Traces(pools, build_lengths(points, scenario.workload.p95_over_mean, where), source)


def _find_trace(devices: TraceFile) -> tuple[str, str]:
    found = find_trace(devices.file)
    if found is not None:
        return found
    if devices.fallback and not os.environ.get(TRACES_VARIABLE):
        source = f"SYNTHETIC ({devices.fallback}); set {TRACES_VARIABLE} for the public"
        return str(SCENARIOS_DIR / devices.fallback), source
    raise ValueError(describe_missing(devices.file, "devices.file"))


def _read_tree(name_or_path: str) -> dict[str, Any]:
    shipped = name_or_path in list_scenarios()
    path = SCENARIOS_DIR / f"{name_or_path}.yaml" if shipped else Path(name_or_path)
    if not path.is_file():
        near = difflib.get_close_matches(name_or_path, list_scenarios(), n=1)
        mend = f"did you mean the scenario `{near[0]}`?" if near else f"they are {', '.join(list_scenarios())}."
        raise ConfigError(f"There is no scenario and no file `{name_or_path}`; {mend}")
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name_or_path} can't be read: {error}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{name_or_path} is no YAML: {getattr(error, 'problem', error)}{line}.") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{name_or_path} must hold `key: value` lines.")
    return tree


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"The override `{override}` must read key=value, for example gamma=0.3.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"The value of `{override}` is no YAML; quote it if it is text.") from None
    *parents, last = key.strip().split(".")
    node = tree
    for parent in parents:
        child = node.get(parent)
        node[parent] = node = dict(child) if isinstance(child, dict) else {}
    # `preset` and `path` exclude each other: an override of one takes the place of the other.
    if parents and last in ("preset", "path"):
        node.pop("path" if last == "preset" else "preset", None)
    node[last] = value


def _describe(error: ValidationError) -> str:
    """Return one sentence for the problem that explains most: an unknown key first, then the deepest, then our own."""
    problem = min(
        error.errors(),
        key=lambda each: (each["type"] != "extra_forbidden", -len(each["loc"]), each["type"] != "value_error"),
    )
    path = [str(part) for part in problem["loc"] if str(part) not in _BRANCHES and "[" not in str(part)]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        return _unknown_key(path)
    if problem["type"] == "missing":
        return f"`{key}` is missing; a scenario must have it."
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}." if key else f"{problem['ctx']['error']}."
    message = re.sub("^(Input|List|Keys) should", "it must", problem["msg"]).replace("valid dictionary", "mapping")
    message = re.sub(" or instance of [A-Za-z]+| after validation, not 0", "", message)
    return f"`{key}` is {problem['input']!r}: {message}."


# Names of a union's branches that pydantic puts into the path of a problem; they are no keys of ours.
_BRANCHES = {"TraceFile", "ModelSource", "constrained-float", "constrained-str", "str", "int", "float"}


def _unknown_key(path: list[str]) -> str:
    model: Any = Scenario
    for part in path[:-1]:
        model = _child(model, part)
    names = list(model.model_fields)
    key, stem = ".".join(path), "".join(f"{part}." for part in path[:-1])
    near = difflib.get_close_matches(path[-1], names, n=1, cutoff=0.6)
    if near:
        return f"Unknown key `{key}`; did you mean `{stem}{near[0]}`?"
    where = f"`{stem[:-1]}`" if stem else "a scenario"
    return f"Unknown key `{key}`; the keys of {where} are {', '.join(names)}."


def _child(model: type[BaseModel], name: str) -> type[BaseModel]:
    annotation = model.model_fields[name].annotation
    kinds: Mapping[str, Any] = {str(kind): kind for kind in (annotation, *getattr(annotation, "__args__", ()))}
    return next(kind for kind in kinds.values() if isinstance(kind, type) and issubclass(kind, BaseModel))
