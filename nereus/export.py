"""Hands out what a run has trained, at any step that is committed, as a Hugging Face checkpoint."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from fsspec import AbstractFileSystem
from torch import Tensor

from nereus.commits import look_into
from nereus.model.export import abandon_export, begin_export, finish_export, write_slices
from nereus.model.spec import ModelSpec, tensors
from nereus.origin import GROUPS, NoCommit, Origin, Role, copy_from
from nereus.tensor_source import TensorSource, check_tensors, read_ahead
from storage.errors import describe_error, hide_credentials
from storage.slices import TensorSlice
from storage.urls import local_path, open_filesystem

OnProgress = Callable[[int, int], None]  # bytes done, bytes in all
_CHUNK_BYTES = 2**24


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
        files: their names in the new folder.
        step: of the commit that was read; None when RUN_DIR/final was copied.
        notes: what the user should know, in sentences.
    """

    files: tuple[str, ...]
    step: int | None
    notes: tuple[str, ...] = ()


def export_run(
    run_dir: str, out: str, *, role: Role = "actor", step: int | None = None, on_progress: OnProgress | None = None
) -> Exported:
    """Write the actor or critic of a run as a Hugging Face checkpoint that `transformers` loads.

    It is read from the newest intact commit, every byte checked, in bounded memory: so an export of a run that was
    made longer never hands out what an earlier end had left in RUN_DIR/final. That folder is copied where the run has
    no commits left. On local disk `out` appears whole or not at all. In an object store config.json comes last: a
    folder without it is no checkpoint.

    Args:
        run_dir: any fsspec URL.
        out: directory or URL; it must not exist or be empty.
        step: of the commit to read; None means the newest.
        on_progress: called as bytes are read.

    Raises:
        ValueError: no run, no such commit, `out` holds files already, or something can't be read or written.
    """
    run_dir, out = run_dir.rstrip("/"), out.rstrip("/")
    if role not in GROUPS:
        raise ValueError(f"role is {role!r}; it must be actor or critic.")
    names = look_into(run_dir)
    has_final = "final" in names and "config.json" in look_into(f"{run_dir}/final")
    check_new(out)
    can_be_final = has_final and role == "actor" and step is None
    try:
        if "journal" in names:
            return copy_from(run_dir, lambda origin: _export(origin, out, role, on_progress), step=step)
    except NoCommit as error:
        if can_be_final:
            return Exported(tuple(_copy_final(run_dir, out)), None, (str(error),))
        raise
    except ValueError:
        raise
    except Exception as error:
        raise _refusal(run_dir, out, error) from error
    if can_be_final:
        return Exported(tuple(_copy_final(run_dir, out)), None)
    missing = "finished run (no final/config.json)" if role == "actor" and step is None else "run with commits"
    raise ValueError(f"{hide_credentials(run_dir)} holds no {missing}; give the directory of a run.")


def _export(origin: Origin, out: str, role: Role, on_progress: OnProgress | None) -> Exported:
    group = GROUPS[role]
    files = write_checkpoint(
        origin.sources[group],
        origin.specs[group],
        out,
        where=origin.where,
        config_from=origin.config_from[role],
        tokenizer_from=origin.tokenizer_from,
        on_progress=on_progress,
    )
    return Exported(files, origin.step, origin.notes)


def write_checkpoint(
    source: TensorSource,
    spec: ModelSpec,
    out: str,
    *,
    where: str,
    config_from: str | None,
    tokenizer_from: str | None,
    pp: int = 1,
    on_progress: OnProgress | None = None,
) -> tuple[str, ...]:
    """Copy all parameters of a model into a new Hugging Face checkpoint, in the dtype that they are stored in.

    Args:
        where: what the source is called in messages.
        config_from, tokenizer_from: as in `begin_export`.
        pp: pipeline stages that share no file.

    Returns:
        The names of the files in `out`.

    Raises:
        DamagedState: a byte of the source is not what was written; nothing is left of the copy.
        ValueError: as `begin_export`, or the source is of another model.
    """
    check_tensors(source, spec, where)
    dtypes = {source.dtypes[name] for name in tensors(spec)}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    plan = begin_export(out, spec, dtype=dtype, config_from=config_from, tokenizer_from=tokenizer_from, pp=pp)
    try:
        files = tuple(sorted(os.listdir(plan.folder)))
        written = write_slices(plan, _read_all(source, spec, on_progress))
        finish_export(plan, written_bytes=written)
    except BaseException:
        abandon_export(plan)
        raise
    return files


def _read_all(
    source: TensorSource, spec: ModelSpec, on_progress: OnProgress | None
) -> Iterator[tuple[TensorSlice, Tensor]]:
    names = list(tensors(spec))
    total = sum(math.prod(source.shapes[name]) * source.dtypes[name].itemsize for name in names)
    done = 0
    for parts, read in read_ahead(source, source.batches(names)):
        yield from zip(parts, read, strict=True)
        done += sum(tensor.nbytes for tensor in read)
        if on_progress is not None:
            on_progress(done, total)


def check_new(out: str) -> None:
    """Raise ValueError unless `out` is a place where nothing is yet."""
    if look_into(out):
        raise ValueError(f"{hide_credentials(out)} is not empty; give a new directory.")


# RUN_DIR/final


def _copy_final(run_dir: str, out: str) -> list[str]:
    try:
        source, source_path = open_filesystem(f"{run_dir}/final")
        target, target_path = open_filesystem(out)
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
    return ValueError(f"{run_dir} can't be exported to {out} ({describe_error(error)}); nothing is exported.")
