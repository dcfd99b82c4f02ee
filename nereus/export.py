"""Hands out a finished run's actor as a Hugging Face checkpoint."""

import os
import shutil
from collections.abc import Sequence

from fsspec import AbstractFileSystem

from storage.errors import describe_error, hide_credentials
from storage.urls import local_path, open_filesystem

_CHUNK_BYTES = 2**24


def export_run(run_dir: str, out: str) -> list[str]:
    """Copy the checkpoint that a run ended with to `out` and return the names of its files.

    On local disk `out` appears whole or not at all. In an object store config.json comes last: a folder without it is
    no checkpoint.

    Args:
        run_dir: of a finished run; any fsspec URL.
        out: directory or URL; it must not exist or be empty.

    Raises:
        ValueError: no run, no checkpoint in it, `out` holds files already, or one of them can't be read or written.
    """
    run_dir, out = run_dir.rstrip("/"), out.rstrip("/")
    try:
        source, source_path = open_filesystem(f"{run_dir}/final")
        target, target_path = open_filesystem(out)
        has_checkpoint = source.exists(f"{source_path}/config.json")
        is_taken = target.exists(target_path) and (not target.isdir(target_path) or bool(target.find(target_path)))
    except Exception as error:  # every store has errors of its own
        raise _refusal(run_dir, out, error) from error
    if not has_checkpoint:
        raise ValueError(
            f"{hide_credentials(run_dir)} holds no finished run (no final/config.json); give a run that has ended."
        )
    if is_taken:
        raise ValueError(f"{hide_credentials(out)} is not empty; give a new directory.")
    try:
        names = [path.removeprefix(source_path).lstrip("/") for path in source.find(source_path)]
        if local_path(out) is None:
            names.sort(key=lambda name: name == "config.json")
            _copy(source, source_path, target, target_path, names)
        else:
            _copy_whole(source, source_path, target, target_path, names)
    except Exception as error:
        raise _refusal(run_dir, out, error) from error
    return names


def _copy_whole(
    source: AbstractFileSystem, source_path: str, target: AbstractFileSystem, out: str, names: Sequence[str]
) -> None:
    """Copy into a hidden folder beside the local folder `out`, then rename it; it is removed if that fails."""
    parent, name = os.path.split(os.path.abspath(out))
    hidden = os.path.join(parent, f".{name}.partial-{os.getpid()}")
    shutil.rmtree(hidden, ignore_errors=True)  # of a killed process that had our number
    try:
        _copy(source, source_path, target, hidden, names)
        os.rename(hidden, out)  # over an empty folder too; refused where another writer has put files meanwhile
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _copy(
    source: AbstractFileSystem, source_path: str, target: AbstractFileSystem, target_path: str, names: Sequence[str]
) -> None:
    for name in names:
        destination = f"{target_path}/{name}"
        target.makedirs(destination.rsplit("/", 1)[0], exist_ok=True)
        with source.open(f"{source_path}/{name}", "rb") as reader, target.open(destination, "wb") as writer:
            while chunk := reader.read(_CHUNK_BYTES):
                writer.write(chunk)


def _refusal(run_dir: str, out: str, error: Exception) -> ValueError:
    run_dir, out = hide_credentials(run_dir), hide_credentials(out)
    return ValueError(f"{run_dir}/final can't be copied to {out} ({describe_error(error)}); nothing is exported.")
