"""Rewrites staged state or a Hugging Face checkpoint for another layout, as either, in bounded memory.

Any layout reads any staged state; what changes is which bytes lie in which file: those of one rank together.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from nereus.export import OnProgress, check_new, write_checkpoint
from nereus.layout import Layout, check_layout
from nereus.model.export import make_partial_folder, rename_folder
from nereus.model.spec import tensors
from nereus.origin import GROUPS, Origin, Role, copy_from
from nereus.plan import Plan, StagePlan
from nereus.staged_state import ShardOrder, plan_shards
from nereus.tensor_source import TensorSource, read_ahead
from storage.errors import describe_error, hide_credentials
from storage.manifest import MANIFEST_NAME, Manifest
from storage.retry import retried
from storage.shard_record import ShardRecord
from storage.shard_writer import ShardWriter
from storage.state import commit_state
from storage.urls import local_path, open_filesystem

Kind = Literal["state", "hf"]


@dataclass(frozen=True)
class Resharded:
    """What was written: its kind, files, and what the user should know, in sentences."""

    kind: Kind
    files: tuple[str, ...]
    num_bytes: int
    notes: tuple[str, ...] = ()


def reshard(
    source: str,
    target: str,
    *,
    tp: int,
    pp: int,
    to: Kind = "state",
    role: Role = "actor",
    on_progress: OnProgress | None = None,
) -> Resharded:
    """Copy staged state or a Hugging Face checkpoint into files that lie as a layout of `tp` x `pp` ranks holds them.

    Staged state keeps its moments, counters and run state. Of a Hugging Face checkpoint staged state holds the
    parameters. A checkpoint written has files that pipeline stages don't share; tp cuts nothing there. Every byte of
    staged state is checked while it is read. Memory: one shard, or one piece of a tensor where that is larger.

    Args:
        source: folder of a staged set, a run's directory (its newest intact commit), or a Hugging Face folder.
        target: new directory or URL; on local disk it appears whole or not at all, elsewhere manifest.json or
            config.json comes last.
        role: which model of staged state becomes a Hugging Face checkpoint.
        on_progress: called as bytes are read.

    Raises:
        ValueError: `source` is neither, `target` holds files, the model doesn't allow the layout, or something can't
            be read or written. A DamagedState where the source is damaged.
    """
    source, target = source.rstrip("/"), target.rstrip("/")
    layout = Layout(tp, pp)
    try:
        check_new(target)
        return copy_from(source, lambda origin: _copy(origin, target, layout, to, role, on_progress))
    except ValueError:
        raise
    except Exception as error:  # every store has errors of its own
        where = f"{hide_credentials(source)} can't be copied to {hide_credentials(target)}"
        raise ValueError(f"{where} ({describe_error(error)}); nothing is left of the copy.") from error


def _copy(
    origin: Origin, target: str, layout: Layout, to: Kind, role: Role, on_progress: OnProgress | None
) -> Resharded:
    for spec in origin.specs.values():
        check_layout(spec, layout)
    if to == "hf":
        return _write_checkpoint(origin, target, layout.pp, role, on_progress)
    return _write_state(origin, target, layout, on_progress)


# To a Hugging Face checkpoint


def _write_checkpoint(origin: Origin, target: str, pp: int, role: Role, on_progress: OnProgress | None) -> Resharded:
    group = GROUPS[role] if GROUPS[role] in origin.sources or len(origin.sources) > 1 else next(iter(origin.sources))
    if group not in origin.sources:
        raise ValueError(f"{origin.where} holds no {group}, but {', '.join(origin.sources)}; choose another role.")
    source = origin.sources[group]
    files = write_checkpoint(
        source,
        origin.specs[group],
        target,
        where=origin.where,
        config_from=origin.config_from[role],
        tokenizer_from=origin.tokenizer_from,
        pp=pp,
        on_progress=on_progress,
    )
    num_bytes = sum(
        math.prod(source.shapes[name]) * source.dtypes[name].itemsize for name in tensors(origin.specs[group])
    )
    notes = origin.notes
    if origin.tokenizer_from is None:
        notes = (*notes, "A staged set holds no tokenizer: copy one in, or give the run's directory as SRC.")
    return Resharded("hf", files, num_bytes, notes)


# To staged state


def _write_state(origin: Origin, target: str, layout: Layout, on_progress: OnProgress | None) -> Resharded:
    orders = {group: _orders_of(origin, group, layout) for group in origin.sources}
    progress = _Progress(sum(order.num_bytes for group in orders.values() for order in group), on_progress)
    with _new_folder(target) as folder:
        records = [
            record
            for group, group_orders in orders.items()
            for record in _write_shards(folder, origin.sources[group], group_orders, progress)
        ]
        plan = {**origin.plan, **{group: _planned(origin.plan.get(group), layout) for group in orders}}
        manifest = Manifest(origin.run_id, origin.step, origin.run_state, plan, tuple(records))
        commit_state(folder, manifest)
    files = (*(record.file for record in records), MANIFEST_NAME)
    return Resharded("state", files, manifest.num_bytes, origin.notes)


def _orders_of(origin: Origin, group: str, layout: Layout) -> list[ShardOrder]:
    """Return the shards that the ranks of one replica would write, of those tensors that there are."""
    if group not in GROUPS.values():
        raise ValueError(f"{origin.where} is a reward model, which staged state never holds; use --to hf.")
    source = origin.sources[group]
    item = max(dtype.itemsize for dtype in source.dtypes.values())
    stage = StagePlan(1, layout, tuple(range(layout.size)), 1)
    shards = plan_shards(Plan.of({group: stage}), {group: origin.specs[group]}, element_bytes=item)
    orders = []
    for order in (order for device in sorted(shards) for order in shards[device]):
        pieces = tuple(piece for piece in order.pieces if piece.name in source.shapes)
        num_bytes = sum(piece.num_elements * source.dtypes[piece.name].itemsize for piece in pieces)
        if pieces:
            orders.append(replace(order, pieces=pieces, num_bytes=num_bytes))
    left = source.shapes.keys() - {piece.name for order in orders for piece in order.pieces}
    if left:
        raise ValueError(f"{origin.where} holds {min(left)}, for which its model has no place; it is of another model.")
    return orders


def _write_shards(
    folder: str, source: TensorSource, orders: Sequence[ShardOrder], progress: _Progress
) -> Iterator[ShardRecord]:
    for order, (pieces, read) in zip(orders, read_ahead(source, (order.pieces for order in orders)), strict=True):
        writer = ShardWriter(folder, group=order.group, file=order.file)
        for piece, tensor in zip(pieces, read, strict=True):
            writer.add(piece, source.shapes[piece.name], tensor)
        yield retried(writer.finish_shard)
        progress.add(order.num_bytes)


def _planned(before: Any, layout: Layout) -> dict[str, Any]:
    """Return a model-stage's entry of the plan that the new files are laid out for."""
    rest = before if isinstance(before, dict) else {"micro_batch": 1, "recompute": False}
    return {**rest, "dp": 1, "tp": layout.tp, "pp": layout.pp, "devices": list(range(layout.size))}


class _Progress:
    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


@contextmanager
def _new_folder(target: str) -> Iterator[str]:
    """Give a folder to write into that becomes `target` at the end of the block, or goes if that fails."""
    path = local_path(target)
    if path is None:
        try:
            yield target
        except BaseException:
            _remove(target)
            raise
        return
    folder = make_partial_folder(path)
    try:
        yield folder
        rename_folder(folder, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove(url: str) -> None:
    with suppress(Exception):  # what is left is no state: its manifest is missing
        filesystem, path = open_filesystem(url)
        filesystem.rm(path, recursive=True)
