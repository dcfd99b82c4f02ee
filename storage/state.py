"""A staged set as a whole: committed by its manifest, which is written last; read back, and verified byte by byte."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from storage.errors import describe_error, hide_credentials
from storage.exclusive import create_exclusively, sync_folder
from storage.manifest import MANIFEST_NAME, Manifest, check_manifest_size, dump_manifest, parse_manifest
from storage.retry import retried
from storage.safetensors_header import parse_header
from storage.shard_reader import PieceRead, ShardReader, open_staged
from storage.shard_record import DamagedState, Piece, ShardRecord, damage
from storage.urls import join_url, local_path, open_filesystem

_VERIFY_BUFFER_BYTES = 4 * 2**20


def commit_state(folder_url: str | os.PathLike[str], manifest: Manifest) -> str:
    """Write the manifest of a set whose shards are complete, and return its checksum.

    All shards are there with their sizes, and their names are on the disk, before it is written; it is created whole
    and exactly once. Committing the same manifest again is no error.

    Raises:
        DamagedState: a shard is missing or has another size.
        FileExistsError: the folder has another manifest.
        ValueError: the manifest contradicts itself, or holds what JSON doesn't know.
        OSError: the store can't be reached or is full.
    """
    url = join_url(folder_url, MANIFEST_NAME)
    data = dump_manifest(manifest)
    checksum = parse_manifest(data, hide_credentials(url)).checksum  # what couldn't be read must not be written
    sizes = _list_sizes(folder_url) if manifest.shards else {}
    for shard in manifest.shards:
        size = sizes.get(shard.file)
        if size != shard.num_bytes:
            found = "it is missing" if size is None else f"it has {size} bytes, not {shard.num_bytes}"
            raise damage(hide_credentials(join_url(folder_url, shard.file)), found)
    path = local_path(folder_url)
    if path is not None and manifest.shards:
        sync_folder(path)
    try:
        create_exclusively(url, data)
    except FileExistsError:
        if _read_manifest(url) != data:
            raise
    return checksum


def _list_sizes(folder_url: str | os.PathLike[str]) -> Mapping[str, int]:
    """Return the size of every file in a folder, by its name."""
    path = local_path(folder_url)
    if path is not None:
        with os.scandir(path) as entries:
            return {e.name: e.stat(follow_symlinks=False).st_size for e in entries if e.is_file(follow_symlinks=False)}
    filesystem, folder = open_filesystem(folder_url)
    filesystem.invalidate_cache(folder)
    found = retried(lambda: filesystem.ls(folder, detail=True))
    return {posixpath.basename(item["name"]): int(item["size"]) for item in found if item["type"] == "file"}


def _read_manifest(url: str) -> bytes:
    where = hide_credentials(url)
    file = open_staged(url)
    try:
        check_manifest_size(file.size, where)
        data = bytearray(file.size)
        file.read_into(0, memoryview(data))
    finally:
        file.close()
    return bytes(data)


def read_state(folder_url: str | os.PathLike[str], *, checksum: str | None = None) -> Manifest:
    """Return the manifest of a set, checked as `parse_manifest` says; no shard is looked at.

    Args:
        folder_url: of the set.
        checksum: what the manifest's checksum has to be, if that is known.

    Raises:
        DamagedState: there is no manifest (the set was never committed), it is damaged, or another one than expected.
        OSError: the store can't be reached.
    """
    url = join_url(folder_url, MANIFEST_NAME)
    manifest = parse_manifest(_read_manifest(url), hide_credentials(url))
    if checksum is not None and manifest.checksum != checksum:
        raise damage(hide_credentials(url), f"it is another manifest than the one committed here ({checksum})")
    return manifest


def verify_state(folder_url: str | os.PathLike[str], *, on_bytes: Callable[[int], None] | None = None) -> list[str]:
    """Read every byte of a set and return what is wrong, a sentence each; none when it is intact.

    `on_bytes` is called with the number of bytes each time some more were read.
    """
    try:
        manifest = read_state(folder_url)
    except (DamagedState, OSError) as error:
        return [describe_error(error)]
    problems = []
    buffer = torch.empty(_VERIFY_BUFFER_BYTES, dtype=torch.uint8)
    for shard in manifest.shards:
        problems += _verify_shard(folder_url, shard, buffer, on_bytes or (lambda num_bytes: None))
    return problems


def _verify_shard(
    folder_url: str | os.PathLike[str], shard: ShardRecord, buffer: torch.Tensor, on_bytes: Callable[[int], None]
) -> list[str]:
    try:
        reader = ShardReader(folder_url, shard)
    except (DamagedState, OSError) as error:
        on_bytes(shard.num_bytes)
        return [describe_error(error)]
    problems = []
    try:
        on_bytes(shard.header_bytes)
        problems += _compare_header(reader, shard)
        for pieces in _runs_of(shard.pieces, buffer.numel()):
            problems += _verify_pieces(reader, pieces, buffer)
            on_bytes(pieces[-1].stop - pieces[0].start)
    finally:
        reader.close()
    return problems


def _runs_of(pieces: Sequence[Piece], num_bytes: int) -> Iterator[list[Piece]]:
    """Yield pieces that lie side by side, as many as fit into some bytes, so that they take one request of a store."""
    run: list[Piece] = []
    for piece in pieces:
        if run and (piece.start != run[-1].stop or piece.stop - run[0].start > num_bytes):
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _verify_pieces(reader: ShardReader, pieces: Sequence[Piece], buffer: torch.Tensor) -> list[str]:
    """Return what is wrong with each of some pieces; they are read at once unless something is."""
    try:
        reader.read([PieceRead(piece, reader.record.tensors[piece.part.name], ()) for piece in pieces], buffer)
        return []
    except (DamagedState, OSError) as error:
        if len(pieces) == 1:
            return [describe_error(error)]
    return [problem for piece in pieces for problem in _verify_pieces(reader, [piece], buffer)]


def _compare_header(reader: ShardReader, shard: ShardRecord) -> list[str]:
    """Return where the file's own header, which readers of the set don't use, says something else than the manifest."""
    try:
        header = parse_header(reader.header, shard.num_bytes, reader.where)
    except ValueError as error:
        return [describe_error(error)]
    for piece in shard.pieces:
        entry = header.entries.get(piece.key)
        meta = shard.tensors[piece.part.name]
        if entry is None or entry.dtype != meta.dtype or not entry.start <= piece.start <= piece.stop <= entry.stop:
            return [str(damage(reader.where, f"its header places the key {piece.key!r} elsewhere than the manifest"))]
    return []
