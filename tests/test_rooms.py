"""The rooms depend on each other in one direction only; read from the sources, nothing is imported here."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("storage", "nereus", "tasks", "flows")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield every imported module of a file, and whether the import is at the file's top level."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            yield from ((f"{node.module}.{alias.name}", id(node) in top) for alias in node.names)


def importers_of(*packages: str) -> set[str]:
    """Return the files, relative to the root, that import one of the packages, at whatever level."""
    return {
        str(path.relative_to(ROOT))
        for path in FILES
        for module, _ in imports_of(path)
        if any(f"{module}.".startswith(f"{package}.") for package in packages)
    }


def in_rooms(files: set[str], *rooms: str) -> set[str]:
    return {file for file in files if file.split("/")[0] in rooms}


def test_there_is_something_to_read():
    assert len(FILES) > 30


def test_dependencies_point_one_way():
    assert in_rooms(importers_of("nereus", "tasks", "flows", "tests"), "storage") == set()
    shell = {file for file in importers_of("tasks", "flows", "tests") if file.startswith("nereus/cli/")}
    assert in_rooms(importers_of("tasks", "flows", "tests"), "nereus") == shell
    assert in_rooms(importers_of("flows", "tests"), "tasks") == set()
    assert in_rooms(importers_of("tests"), "flows") == set()


def test_prefect_is_known_to_tasks_and_flows_only():
    assert in_rooms(importers_of("prefect"), "storage", "nereus") == set()


def test_collectives_are_known_to_the_runtime_only():
    files = importers_of("torch.distributed")
    assert {file for file in files if not file.startswith("nereus/runtime/")} == set()


def test_ray_is_known_to_one_file_at_most():
    assert len(importers_of("ray")) <= 1


def test_the_command_line_is_outermost():
    assert {file for file in importers_of("nereus.cli") if not file.startswith("nereus/cli/")} == set()
    for path in (ROOT / "nereus/cli").glob("*.py"):
        at_top = {module for module, top in imports_of(path) if top}
        assert not any(module.startswith(("flows", "tasks")) for module in at_top), path


@pytest.mark.parametrize(
    "module", ["nereus", "nereus.config", "nereus.layout", "nereus.plan", "nereus.cost", "nereus.model", "nereus.cli"]
)
def test_pure_rooms_start_without_torch(module: str):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_is_on_its_rooms_map(room: str):
    readme = (ROOT / room / "README.md").read_text()
    files = [path for path in FILES if path.relative_to(ROOT).parts[0] == room and path.name != "__init__.py"]
    assert [path.name for path in files if f"`{path.name}`" not in readme] == []
