"""Whether the places that a manifest names make sense: every byte and every element in exactly one of them."""

from __future__ import annotations

import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence

from storage.shard_record import ITEM_BYTES, Piece, ShardRecord, TensorMeta, cut_dim, follows, key_of

MAX_HEADER_BYTES = 8 + 8 * 2**20  # of a shard, its length prefix included; a longer one is not read


class Inconsistent(ValueError):
    """What is wrong with a manifest, without the file's name."""


def check_shard(shard: ShardRecord) -> None:
    """Check that header and pieces tile the file, and that each piece has a legal place, length and key.

    Raises:
        Inconsistent: they don't.
    """
    if not 8 < shard.header_bytes <= MAX_HEADER_BYTES:
        raise Inconsistent(f"the header of {shard.file} would have {shard.header_bytes} bytes")
    position = shard.header_bytes
    for piece in shard.pieces:
        if piece.start != position:
            what = "overlap" if piece.start < position else "leave a hole"
            raise Inconsistent(f"pieces of {shard.file} {what} at byte {piece.start}")
        _check_piece(piece, shard.tensors[piece.part.name], shard.file)
        position = piece.stop
    if position != shard.num_bytes:
        raise Inconsistent(f"{shard.file} has {shard.num_bytes} bytes, but its pieces end at byte {position}")
    _check_keys(shard)


def _check_piece(piece: Piece, meta: TensorMeta, file: str) -> None:
    part, shape, what = piece.part, meta.shape, f"a piece of tensor {piece.part.name!r} in {file}"
    if len(part.sizes) != len(shape) or not all(map(operator.le, part.stops, shape)):
        raise Inconsistent(f"{what} lies outside the tensor's shape {shape}")
    if sum(map(operator.ne, part.sizes, shape)) > 1:
        raise Inconsistent(f"{what} is cut in more than one dimension")
    if part.num_elements == 0 or piece.stop - piece.start != part.num_elements * ITEM_BYTES[meta.dtype]:
        raise Inconsistent(f"{what} has {part.num_elements} elements in {piece.stop - piece.start} bytes")


def _check_keys(shard: ShardRecord) -> None:
    seen: set[str] = set()
    for (name, key), run in itertools.groupby(shard.pieces, key=lambda piece: (piece.part.name, piece.key)):
        pieces, shape = list(run), shard.tensors[name].shape
        joined = all(follows(b.part, a.part, shape) for a, b in itertools.pairwise(pieces))
        if key in seen or not joined or key != key_of(name, shape, pieces[0].part, pieces[-1].part):
            raise Inconsistent(f"the key {key!r} of {shard.file} doesn't fit the pieces that name it")
        seen.add(key)


def check_tensors(shards: Iterable[ShardRecord]) -> None:
    """Check that files are named once, and that the pieces of all shards cover each tensor exactly once.

    Raises:
        Inconsistent: they don't.
    """
    files: set[str] = set()
    metas: dict[tuple[str, str], TensorMeta] = {}
    pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for shard in shards:
        if shard.file in files:
            raise Inconsistent(f"it names the file {shard.file} twice")
        files.add(shard.file)
        for name, meta in shard.tensors.items():
            if metas.setdefault((shard.group, name), meta) != meta:
                raise Inconsistent(f"tensor {name!r} of {shard.group} has two shapes or dtypes")
        for piece in shard.pieces:
            pieces[shard.group, piece.part.name].append(piece)
    for (group, name), meta in metas.items():
        _check_cover(f"tensor {name!r} of {group}", meta, pieces[group, name])


def _check_cover(what: str, meta: TensorMeta, pieces: Sequence[Piece]) -> None:
    cuts = {cut_dim(piece.part, meta.shape) for piece in pieces}
    if math.prod(meta.shape) == 0:
        return
    if not pieces:
        raise Inconsistent(f"{what} has a gap: none of it is there")
    if len(cuts) > 1:
        raise Inconsistent(f"pieces of {what} overlap, being cut in different dimensions")
    dim = cuts.pop()
    if dim is None:
        if len(pieces) > 1:
            raise Inconsistent(f"pieces of {what} overlap")
        return
    position = 0
    for piece in sorted(pieces, key=lambda piece: piece.part.starts[dim]):
        if piece.part.starts[dim] != position:
            raise Inconsistent(f"pieces of {what} {'overlap' if piece.part.starts[dim] < position else 'leave a gap'}")
        position = piece.part.stops[dim]
    if position != meta.shape[dim]:
        raise Inconsistent(f"pieces of {what} leave a gap at the end")
