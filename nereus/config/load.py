"""From recipe names, YAML files and `key=value` overrides to one checked RunConfig."""

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import fsspec
import yaml
from pydantic import BaseModel, ValidationError

from nereus.config.parts import ConfigError
from nereus.config.plan_parts import ModelStageName
from nereus.config.run import RunConfig

RECIPES_DIR = Path(__file__).resolve().parent.parent / "recipes"
_PACKAGE_SCHEME = "pkg://nereus.recipes/"
# Keys that exclude each other: an override of one takes the place of the other.
_RIVALS = {"reward.function": "model", "reward.model": "function"}
_RIVALS |= {f"{role}.path": "tiny" for role in ("model", "critic", "reference")}
_RIVALS |= {f"{role}.tiny": "path" for role in ("model", "critic", "reference")}


def list_recipes() -> list[str]:
    """Return the names of the recipes shipped in the package."""
    return sorted(file.stem for file in RECIPES_DIR.glob("*.yaml"))


def resolve_path(path: str) -> str:
    """Return where a path of a config lies: `pkg://nereus.recipes/NAME` in the package, all else unchanged."""
    return str(RECIPES_DIR / path.removeprefix(_PACKAGE_SCHEME)) if path.startswith(_PACKAGE_SCHEME) else path


def load_config(recipe_or_path: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the config of a recipe or YAML file with dotted `key=value` overrides applied.

    Raises:
        ConfigError: no such recipe or file, no YAML, an unknown key, or a value out of bounds.
    """
    tree = _read_tree(recipe_or_path)
    for override in overrides:
        _apply_override(tree, override)
    return build_config(tree)


def override_config(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """Return a config with dotted `key=value` overrides applied.

    Raises:
        ConfigError: an unknown key or a value out of bounds.
    """
    tree = config.model_dump(mode="json")
    for override in overrides:
        _apply_override(tree, override)
    return build_config(tree)


def build_config(tree: Mapping[str, Any]) -> RunConfig:
    """Return the config of a tree of plain values, as YAML gives it.

    Raises:
        ConfigError: an unknown key or a value out of bounds; the message names the first one.
    """
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(_describe(error, tree)) from None


def dump_config(config: RunConfig) -> str:
    """Return the config as YAML that `load_config` reads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read_tree(recipe_or_path: str) -> dict[str, Any]:
    is_recipe = recipe_or_path in list_recipes()
    text = (RECIPES_DIR / f"{recipe_or_path}.yaml").read_text() if is_recipe else _read_text(recipe_or_path)
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{recipe_or_path} is no YAML: {getattr(error, 'problem', error)}{line}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{recipe_or_path} must hold `key: value` lines, not a {type(tree).__name__}.")
    return tree


def _read_text(path: str) -> str:
    if "://" not in path and not os.path.isfile(path):
        near = difflib.get_close_matches(path, list_recipes(), n=1)
        mend = f"did you mean the recipe `{near[0]}`?" if near else f"the recipes are {', '.join(list_recipes())}."
        raise ConfigError(f"There is no recipe and no file `{path}`; {mend}")
    try:
        with fsspec.open(path, "r") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from None


def _apply_override(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"The override `{override}` must read key=value, for example steps=10.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"The value of `{override}` is no YAML; quote it if it is text.") from None
    path = _split_key(key.strip())
    node = tree
    for depth, part in enumerate(path[:-1]):
        child = node.get(part)
        if child is None or (path[: depth + 1] == ["plan"] and child == "auto"):
            child = {}
        if path[0] == "plan" and isinstance(child, list | tuple):
            raise ConfigError(
                f"`{key}` can't be set alone, since `plan` is a schedule; give all of it, like "
                "plan='[[0, {...}], [4, {...}]]'."
            )
        if not isinstance(child, dict):
            raise ConfigError(_unknown_key(path))
        node[part] = child = dict(child)
        node = child
    rival = _RIVALS.get(".".join(path[:2]))
    if rival is not None and value is not None:
        tree[path[0]][rival] = None
    node[path[-1]] = value


def _split_key(key: str) -> list[str]:
    """Split a dotted key; the dot of a model-stage's name belongs to the name."""
    parts = key.split(".")
    return [parts[0], ".".join(parts[1:3]), *parts[3:]] if parts[0] == "plan" and len(parts) > 2 else parts


def _describe(error: ValidationError, tree: Mapping[str, Any]) -> str:
    """Return one sentence for the problem that explains most: an unknown key first, then the deepest, then our own."""
    problems = sorted(
        error.errors(),
        key=lambda problem: (not _is_unknown(problem), -len(problem["loc"]), problem["type"] != "value_error"),
    )
    problem = problems[0]
    path = _key_path(problem)
    # The branches of a union complain one by one about the same key.
    wishes = dict.fromkeys(_wish(other["msg"]) for other in reversed(problems) if _key_path(other) == path)
    where = ""
    if path[:1] == ["plan"] and path[1:] and path[1].isdigit():  # in a schedule: entry, then 1, the plan of the pair
        where = f" from step {tree['plan'][int(path[1])][0]} on"
        path = ["plan", *path[3:]]
    if _is_unknown(problem):
        return _unknown_key(path)
    key = ".".join(path)
    if problem["type"] == "value_error":
        return f"{key}: {problem['ctx']['error']}." if key else f"{problem['ctx']['error']}."
    if problem["type"] == "missing":
        return f"`{key}` is missing; give it a value."
    return f"`{key}`{where} is {problem['input']!r}: {' or '.join(wishes)}."


def _is_unknown(problem: Mapping[str, Any]) -> bool:
    return problem["type"] == "extra_forbidden" or "[key]" in problem["loc"]


def _key_path(problem: Mapping[str, Any]) -> list[str]:
    """Return the keys to a problem; pydantic also names the tried branch of a union, which is no key of ours."""
    tags = ("literal[", "dict[", "tuple[", "constrained-int", "function-")
    return [str(part) for part in problem["loc"] if part != "[key]" and not str(part).startswith(tags)]


def _wish(message: str) -> str:
    message = message.replace("valid dictionary or instance of", "mapping of the keys of")
    return (
        message.replace("valid dictionary", "mapping").replace("Input should", "it must").replace("Field", "a value is")
    )


def _unknown_key(path: list[str]) -> str:
    key = ".".join(path)
    known = list(_known_keys(RunConfig))
    parent = next((name for name in reversed(known) if key.startswith(f"{name}.")), "")
    stem = f"{parent}." if parent else ""
    inside = [name.removeprefix(stem) for name in known if name.startswith(stem)]
    names = [name for name in inside if "." not in name]
    names = names or list(get_args(ModelStageName))  # of `plan`
    near = [stem + name for name in difflib.get_close_matches(key.removeprefix(stem), names, n=1, cutoff=0.7)]
    near = near or [name for name in known if name.split(".")[-1] == path[-1]][:1]
    if near:
        return f"Unknown key `{key}`; did you mean `{near[0]}`?"
    where = f"`{parent}`" if parent else "a run config"
    return f"Unknown key `{key}`; the keys of {where} are {', '.join(names)}."


def _known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a model, those of nested models and of plan entries included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _known_keys(kind, f"{prefix}{name}.")
            elif get_args(kind)[:1] == (ModelStageName,):
                for stage in get_args(ModelStageName):
                    yield f"{prefix}{name}.{stage}"
                    yield from _known_keys(get_args(kind)[1], f"{prefix}{name}.{stage}.")
