"""The manifest of a staged set: what is in it, piece by piece; written last, and read with distrust.

Memory and time of reading are bounded by the length of the text (at most MAX_MANIFEST_BYTES) and by the number of JSON
values in it. What `parse_manifest` returns is consistent: every tensor is covered exactly once, every byte of a file
belongs to its header or to one piece, and no name leads out of the folder.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import xxhash

from storage.manifest_checks import Inconsistent, check_shard, check_tensors
from storage.shard_record import ITEM_BYTES, DamagedState, Piece, ShardRecord, TensorMeta, damage
from storage.slices import TensorSlice

__all__ = ["DamagedState", "Manifest", "Piece", "ShardRecord", "TensorMeta", "dump_manifest", "parse_manifest"]

FORMAT, VERSION = "nereus-state", 1
MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_VALUES = 2**22  # JSON values: thousands of devices need fewer, and more would take gigabytes of memory
MAX_DIMS = 16

GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
FILE = re.compile(r"(?!.*\.\.)[A-Za-z0-9][A-Za-z0-9._-]{0,199}\.safetensors")
NAME = re.compile(r"[!-?A-~]{1,500}")  # printable ASCII without "@", which sets off the start of a key

_TOP = frozenset({"format", "version", "run_id", "step", "run_state", "plan", "shards"})
_SHARD = frozenset({"group", "file", "num_bytes", "header_checksum", "tensors"})
_TENSOR = frozenset({"dtype", "shape", "pieces"})
_PIECE = frozenset({"starts", "sizes", "key", "bytes", "checksum"})
_KEY, _RUN_ID = re.compile(r"[!-~]{1,530}"), re.compile(r"[^\x00-\x1f\ud800-\udfff]{1,1000}")
_HEX16, _HEX32 = re.compile(r"[0-9a-f]{16}"), re.compile(r"[0-9a-f]{32}")
_START = re.compile(rb'\{"format":"nereus-state","version":([1-9][0-9]{0,8}),')
_END = re.compile(rb',"checksum":"([0-9a-f]{32})"\}')
_END_BYTES = len(',"checksum":""}') + 32


@dataclass(frozen=True)
class Manifest:
    """What a staged set holds. `run_state` and `plan` are maps of JSON values that this room doesn't look into."""

    run_id: str
    step: int
    run_state: dict[str, Any]
    plan: dict[str, Any]
    shards: tuple[ShardRecord, ...]
    checksum: str = field(default="", compare=False)  # of the text it was read from, 32 hexadecimal digits

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(shard.group for shard in self.shards))

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, headers included."""
        return sum(shard.num_bytes for shard in self.shards)

    def shards_of(self, group: str) -> tuple[ShardRecord, ...]:
        return tuple(shard for shard in self.shards if shard.group == group)

    def tensors_of(self, group: str) -> Mapping[str, TensorMeta]:
        return {name: meta for shard in self.shards_of(group) for name, meta in shard.tensors.items()}


def dump_manifest(manifest: Manifest) -> bytes:
    """Return the text of a manifest, its own checksum last.

    Raises:
        ValueError: the run state or the plan holds what JSON doesn't know (nan, inf, objects).
    """
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "run_id": manifest.run_id,
        "step": manifest.step,
        "run_state": manifest.run_state,
        "plan": manifest.plan,
        "shards": [_shard_tree(shard) for shard in manifest.shards],
    }
    try:
        text = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"the run state or plan of step {manifest.step} is no JSON ({error}).") from None
    return text[:-1] + f',"checksum":"{xxhash.xxh3_128_hexdigest(text)}"}}'.encode()


def _shard_tree(shard: ShardRecord) -> dict[str, Any]:
    tensors: dict[str, Any] = {
        name: {"dtype": meta.dtype, "shape": meta.shape, "pieces": []} for name, meta in shard.tensors.items()
    }
    for piece in shard.pieces:
        place = {"starts": piece.part.starts, "sizes": piece.part.sizes, "key": piece.key}
        where = {"bytes": [piece.start, piece.stop], "checksum": piece.checksum}
        tensors[piece.part.name]["pieces"].append(place | where)
    return {
        "group": shard.group,
        "file": shard.file,
        "num_bytes": shard.num_bytes,
        "header_checksum": shard.header_checksum,
        "tensors": tensors,
    }


def check_manifest_size(num_bytes: int, where: str) -> None:
    """Raise DamagedState when a manifest is too large to be read at all."""
    if num_bytes > MAX_MANIFEST_BYTES:
        raise DamagedState(
            f"{where} has {num_bytes} bytes, above the limit of {MAX_MANIFEST_BYTES} for a manifest, and is not read; "
            "use another commit."
        )


def parse_manifest(data: bytes, where: str) -> Manifest:
    """Return the manifest that a text describes, everything about it checked.

    Raises:
        DamagedState: anything that could make a read return wrong bytes, leave the folder, or use memory or time
            without bound; `where` names the file.
    """
    check_manifest_size(len(data), where)
    begin, end = _START.match(data), _END.fullmatch(data[-_END_BYTES:])
    if begin is None:
        raise DamagedState(f"{where} is no {FORMAT} manifest, or its first bytes are damaged; use another commit.")
    if int(begin[1]) != VERSION:
        raise DamagedState(
            f"{where} has format version {int(begin[1])}, but this program reads version {VERSION} only; "
            "use the program that wrote it, or another commit."
        )
    text = data[:-_END_BYTES] + b"}"
    checksum = xxhash.xxh3_128_hexdigest(text)
    if end is None or checksum != end[1].decode():
        raise damage(where, "its text doesn't match the checksum at its end")
    try:
        return _parse_tree(_load(text), checksum)
    except Inconsistent as error:
        raise damage(where, str(error)) from None


def _load(text: bytes) -> dict[str, Any]:
    if text.count(b",") + text.count(b"[") + text.count(b"{") > MAX_VALUES:
        raise Inconsistent(f"it holds more than {MAX_VALUES} JSON values")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name appears twice")
        return result

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text.decode(), object_pairs_hook=unique, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Inconsistent(f"its JSON can't be read ({str(error)[:200]})") from None


def _parse_tree(value: Any, checksum: str) -> Manifest:
    tree = _members(value, "top level", _TOP)
    if tree["format"] != FORMAT or tree["version"] != VERSION:
        _refuse("format and version", (tree["format"], tree["version"]))
    shards = tuple(_parse_shard(shard) for shard in _list(tree["shards"], "shards"))
    for shard in shards:
        check_shard(shard)
    check_tensors(shards)
    return Manifest(
        _text(tree["run_id"], _RUN_ID, "run_id"),
        _sizes([tree["step"]], "step")[0],
        _members(tree["run_state"], "run_state"),
        _members(tree["plan"], "plan"),
        shards,
        checksum,
    )


def _parse_shard(value: Any) -> ShardRecord:
    tree = _members(value, "shard", _SHARD)
    tensors: dict[str, TensorMeta] = {}
    pieces: list[Piece] = []
    for name, item in _members(tree["tensors"], "map of tensors").items():
        described = _members(item, f"tensor {_text(name, NAME, 'tensor name')!r}", _TENSOR)
        if not isinstance(described["dtype"], str) or described["dtype"] not in ITEM_BYTES:
            _refuse(f"dtype of tensor {name!r}", described["dtype"])
        tensors[name] = TensorMeta(described["dtype"], _sizes(described["shape"], f"shape of tensor {name!r}"))
        pieces += (_parse_piece(name, piece) for piece in _list(described["pieces"], f"pieces of {name!r}"))
    return ShardRecord(
        _text(tree["group"], GROUP, "group"),
        _text(tree["file"], FILE, "file name"),
        _sizes([tree["num_bytes"]], "number of bytes of a file")[0],
        _text(tree["header_checksum"], _HEX32, "header checksum"),
        tensors,
        tuple(sorted(pieces, key=lambda piece: piece.start)),
    )


def _parse_piece(name: str, value: Any) -> Piece:
    tree = _members(value, "piece", _PIECE)
    starts, sizes = _sizes(tree["starts"], "place of a piece"), _sizes(tree["sizes"], "size of a piece")
    place = _sizes(tree["bytes"], "byte range of a piece")
    if len(starts) != len(sizes) or len(place) != 2:
        _refuse(f"piece of {name!r}", tree)
    key, checksum = _text(tree["key"], _KEY, "key"), _text(tree["checksum"], _HEX16, "checksum of a piece")
    return Piece(TensorSlice(name, starts, sizes), key, place[0], place[1], checksum)


def _refuse(what: str, value: object) -> NoReturn:
    raise Inconsistent(f"its {what} can't be {reprlib.repr(value)[:200]}")


def _members(value: Any, what: str, names: frozenset[str] | None = None) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(what, value)
    if names and value.keys() != names:
        _refuse(f"members of {what}", list(value))
    return value


def _list(value: Any, what: str) -> list[Any]:
    return value if isinstance(value, list) else _refuse(what, value)


def _text(value: Any, pattern: re.Pattern[str], what: str) -> str:
    return value if isinstance(value, str) and pattern.fullmatch(value) else _refuse(what, value)


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    # A loop over the numbers would be most of the time that a manifest takes.
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        _refuse(what, value)
    if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= 2**63):
        _refuse(what, value)
    return tuple(value)
