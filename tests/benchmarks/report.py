"""What all benchmarks share: the table on the terminal, the JSON file, and what is said of the machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OUT_DIR = Path("build/bench")
DEFAULT_MODEL = "models/smollm2-135m-instruct"
# A terminal is asked for its width; a file or a pipe gets lines long enough for every table here.
_PIPE_WIDTH = 120


def describe_run(benchmark: str, *, threads: int) -> dict[str, Any]:
    """Return the head of a benchmark's record: what ran, on what, and how busy the machine was before it began."""
    import torch

    return {
        "benchmark": benchmark,
        "threads": threads,
        "torch": torch.__version__,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def write_record(record: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a benchmark's record as JSON, making its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=2) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, num_names: int = 1) -> None:
    """Print a table whose first `num_names` columns are names and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_names else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(format_cell(cell) for cell in row))
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_WIDTH)
    console.print(table)


def format_cell(cell: Any) -> str:
    """Return a number with three significant digits, anything else as text and None as a dash."""
    if cell is None:
        return "-"
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.1f}" if abs(cell) >= 10 else f"{cell:.2f}"


def require_model(path: str) -> None:
    """End with exit code 2 and one sentence where the model isn't there.

    Raises:
        SystemExit: `path` holds no config.json.
    """
    if not (Path(path) / "config.json").exists():
        refuse(f"{path} holds no model; run `make smollm2`, or name a Hugging Face directory with --model.")


def refuse(sentence: str) -> None:
    """Print one sentence and end with exit code 2."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)
