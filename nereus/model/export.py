"""Writing a model as a Hugging Face checkpoint, slice by slice, so that no process ever holds the whole of it.

The driver calls `begin_export`, every rank `write_slices` with the slices it owns, the driver `finish_export` (or
`abandon_export` when a rank failed). Until the end everything lies in a hidden folder beside the target:

    begin: .OUT.partial-HOST-PID-N/  headers with room for all tensors, config.json, tokenizer files
    write: every owner writes its byte ranges
    finish: index, fsync, rename to OUT (an object store: upload, config.json last)
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from nereus.layout import Layout, stages_of
from nereus.model.checkpoint import INDEX_FILE, SINGLE_FILE, read_config
from nereus.model.hf_config import build_config, parse_config
from nereus.model.spec import ModelSpec, tensors
from nereus.model.tokens import TOKENIZER_FILES, read_eos_ids
from storage.safetensors_file import SliceWriter, create_file
from storage.slices import TensorSlice
from storage.urls import join_url, local_path, open_filesystem

MAX_FILE_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ExportPlan:
    """What the ranks need to write their part; plain data, made to be sent.

    `files` maps each tensor to its file inside `folder`, a folder that all ranks must be able to write.
    """

    url: str
    folder: str
    files: Mapping[str, str]
    total_bytes: int  # of all tensors: the sum over ranks of what `write_slices` returns
    replace: bool


def begin_export(
    url: str,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    config_from: str | None = None,
    tokenizer_from: str | None = None,
    replace: bool = False,
    max_file_bytes: int = MAX_FILE_BYTES,
    pp: int = 1,
) -> ExportPlan:
    """Prepare the files of a checkpoint: headers with room for every tensor, config.json and the tokenizer.

    Args:
        url: folder to write, local or behind fsspec.
        spec: the model; with a value head it becomes a bare decoder plus the tensor `value_head.weight`.
        dtype: of the written tensors.
        config_from: folder whose config.json and generation_config.json are kept; None builds a config of the spec.
        tokenizer_from: folder whose tokenizer files are copied.
        replace: an earlier export in this place is replaced at the end; else anything there is refused.
        max_file_bytes: larger models are spread over several files with an index.
        pp: pipeline stages that share no file; the spec must allow it.

    Raises:
        ValueError: there is something in that place, or a source folder is missing or broken.
        OSError: no room, or no right to write there.
    """
    _check_target(url, replace=replace)
    assignment = _assign_files(spec, dtype, max_file_bytes, pp)
    folder = _make_folder(url)
    try:
        for file_name, names in assignment.items():
            shapes = {name: (dtype, tensors(spec)[name].shape) for name in names}
            create_file(os.path.join(folder, file_name), shapes, {"format": "pt"})
        _write_config(folder, spec, dtype, config_from, tokenizer_from)
        _copy_files(tokenizer_from, folder, TOKENIZER_FILES)
        files = {name: file_name for file_name, names in assignment.items() for name in names}
        total = sum(math.prod(info.shape) for info in tensors(spec).values()) * dtype.itemsize
        if len(assignment) > 1:
            _write_json(folder, INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": files})
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return ExportPlan(url, folder, files, total, replace)


def write_slices(plan: ExportPlan, parts: Iterable[tuple[TensorSlice, Tensor]]) -> int:
    """Write slices (tensors of shape `slice.sizes`, any float dtype and device), sync them, return their bytes.

    Every element of the model must be written by exactly one rank. Memory: one block of 16 MiB beside the tensors.
    """
    written = 0
    with ExitStack() as stack:
        writers: dict[str, SliceWriter] = {}
        for part, tensor in parts:
            name = plan.files[part.name]
            if name not in writers:
                writers[name] = stack.enter_context(SliceWriter(os.path.join(plan.folder, name)))
            written += writers[name].write(part, tensor)
    return written


def finish_export(plan: ExportPlan, *, written_bytes: int | None = None) -> None:
    """Put the finished checkpoint in its place; on local disk by one rename.

    Args:
        plan: of `begin_export`.
        written_bytes: sum over all ranks of what `write_slices` returned, checked when given.

    Raises:
        OSError: the store failed. The partial folder is removed on any error.
    """
    assert written_bytes in (None, plan.total_bytes), (written_bytes, plan.total_bytes)
    try:
        target = local_path(plan.url)
        if target is None:
            _upload(plan)
        else:
            _sync_folder(plan.folder)
            rename_folder(plan.folder, target.rstrip("/"), replace=plan.replace)
    finally:
        abandon_export(plan)


def abandon_export(plan: ExportPlan) -> None:
    """Remove what an export left; harmless after its end."""
    shutil.rmtree(plan.folder, ignore_errors=True)


def _check_target(url: str, *, replace: bool) -> None:
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    try:
        present = filesystem.ls(path, detail=False) if filesystem.isdir(path) else [path] * filesystem.exists(path)
    except FileNotFoundError:  # object stores have no empty folders
        present = []
    if not present:
        return
    if not replace:
        raise ValueError(f"{url} exists already; export to a new folder or remove it.")
    if not filesystem.exists(join_url(path, "config.json")):
        raise ValueError(f"{url} exists and holds no model, so it is not replaced; export to a new folder.")


def _assign_files(spec: ModelSpec, dtype: torch.dtype, max_file_bytes: int, pp: int) -> dict[str, list[str]]:
    """Return the tensors of each file, in model order; a tensor larger than the limit gets a file of its own."""
    groups: list[list[str]] = [[]]
    size = 0
    stage = 0
    for name, info in tensors(spec).items():
        num_bytes = math.prod(info.shape) * dtype.itemsize
        before, stage = stage, stages_of(spec, Layout(pp=pp), info)[0]
        if groups[-1] and (size + num_bytes > max_file_bytes or stage != before):
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _make_folder(url: str) -> str:
    target = local_path(url)
    if target is not None:
        return make_partial_folder(target)
    prefix = f"nereus-export-{socket.gethostname()}-"
    _remove_leftovers(Path(tempfile.gettempdir()), prefix)
    return tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-")


def make_partial_folder(target: str) -> str:
    """Make a hidden folder beside the local path `target`, to be renamed to it; those of killed processes go."""
    parent, name = os.path.split(target.rstrip("/"))
    os.makedirs(parent, exist_ok=True)
    prefix = f".{name}.partial-{socket.gethostname()}-"
    _remove_leftovers(Path(parent), prefix)
    folder = tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=parent)
    os.chmod(folder, 0o755)  # mkdtemp's 0700 would stay on the finished checkpoint
    return folder


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove partial folders of exporters on this host that were killed."""
    for folder in parent.iterdir():
        if not folder.name.startswith(prefix):
            continue
        pid = folder.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _write_config(
    folder: str, spec: ModelSpec, dtype: torch.dtype, config_from: str | None, tokenizer_from: str | None
) -> None:
    source = read_config(config_from) if config_from else None
    if source is not None:
        described = parse_config(source, str(config_from), spec.head)
        if dataclasses.replace(described, num_labels=spec.num_labels) != spec:
            raise ValueError(f"{config_from} describes another model than the one exported; give its own config.json.")
    eos_ids = read_eos_ids(tokenizer_from) if tokenizer_from else ()
    config = build_config(spec, str(dtype).removeprefix("torch."), source=source, eos_ids=eos_ids)
    assert parse_config(config, "the exported config", spec.head) == spec, (config, spec)
    _write_json(folder, "config.json", config)
    if config_from and not config_from.endswith(".json"):
        _copy_files(config_from, folder, ("generation_config.json",))


def _copy_files(source: str | None, folder: str, names: Iterable[str]) -> None:
    if source is None:
        return
    filesystem, path = open_filesystem(source)
    for name in names:
        if filesystem.isfile(join_url(path, name)):
            filesystem.get_file(join_url(path, name), os.path.join(folder, name))


def _write_json(folder: str, name: str, value: object) -> None:
    Path(folder, name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync_folder(folder: str) -> None:
    for path in (*Path(folder).iterdir(), Path(folder)):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def rename_folder(folder: str, target: str, *, replace: bool = False) -> None:
    """Give a finished folder its name, durably; `replace` puts it where another one is."""
    former = os.path.join(folder, ".replaced")
    if replace and os.path.isdir(target):
        os.rename(target, former)
    try:
        os.rename(folder, target)
    except OSError:
        if os.path.isdir(former):
            os.rename(former, target)
        raise
    shutil.rmtree(os.path.join(target, ".replaced"), ignore_errors=True)
    fd = os.open(os.path.dirname(target) or ".", os.O_RDONLY)
    try:
        os.fsync(fd)  # the rename itself
    finally:
        os.close(fd)


def _upload(plan: ExportPlan) -> None:
    """Copy the folder to its store; config.json comes last, and a former one goes first: no reader sees a mixture."""
    filesystem, path = open_filesystem(plan.url)
    filesystem.makedirs(path, exist_ok=True)
    names = sorted(os.listdir(plan.folder), key=lambda name: (name == "config.json", name))
    if plan.replace:
        former = filesystem.ls(path, detail=False) if filesystem.isdir(path) else []
        for name in sorted(former, key=lambda name: not name.endswith("/config.json")):
            filesystem.rm_file(name)
    for name in names:
        filesystem.put_file(os.path.join(plan.folder, name), join_url(path, name))
