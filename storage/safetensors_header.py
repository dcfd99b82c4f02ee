"""The header of a safetensors file: parsed with distrust, and built for files that are filled slice by slice.

Format: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

# A header of this size names about fifty thousand tensors; a longer one is damage or malice, and is not read.
MAX_HEADER_BYTES = 8 * 2**20

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `[start, stop)` of its file, row-major, of dtype `DTYPES[dtype]`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class Header:
    """What a file says of itself; `checksum` is the xxh3_128 of the header's bytes, its length included."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    file_bytes: int
    checksum: str


def check_header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Return the length of the JSON that the first 8 bytes of a file promise.

    Raises:
        ValueError: the file is too short for it, or the length is beyond reason; nothing more should be read.
    """
    if len(prefix) < 8:
        raise ValueError(f"{where} has {file_bytes} bytes, too few for a safetensors file; write or download it again.")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{where} claims a safetensors header of {length} bytes, above the limit of {MAX_HEADER_BYTES}; "
            "it is damaged or no safetensors file."
        )
    if 8 + length > file_bytes:
        raise ValueError(
            f"{where} has {file_bytes} bytes, but its safetensors header alone would need {8 + length}; "
            "it is cut off, so write or download it again."
        )
    return length


def parse_header(data: bytes, file_bytes: int, where: str) -> Header:
    """Return the header of a file from its first bytes (length prefix and JSON).

    Raises:
        ValueError: anything that would make a read return wrong bytes: no JSON, a name given twice, an unknown dtype,
            a shape or byte range that is malformed, of the wrong size, overlapping, with holes or outside the file.
    """
    length = check_header_length(data, file_bytes, where)
    tree = _load_json(data[8 : 8 + length], where)
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError(f"{where} is damaged: its __metadata__ is no map of strings.")
    data_start = 8 + length
    entries = {name: _parse_entry(name, value, data_start, where) for name, value in tree.items()}
    _check_cover(entries, data_start, file_bytes, where)
    return Header(entries, metadata, file_bytes, xxhash.xxh3_128_hexdigest(data[:data_start]))


def build_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Return the first bytes of a file that will hold these tensors in this order, and their places in it."""
    tree: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + math.prod(shape) * dtype.itemsize
        tree[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start on 8 bytes, so that a memory map of the file is aligned
    assert len(text) <= MAX_HEADER_BYTES, len(text)
    data = len(text).to_bytes(8, "little") + text
    return data, parse_header(data, len(data) + position, "the new file")


def _load_json(text: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError("a name appears twice")
        return result

    try:
        tree = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} has a safetensors header that can't be read ({error}).") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{where} has a safetensors header that is a {type(tree).__name__}, not a map of tensors.")
    return tree


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _parse_entry(name: str, value: Any, data_start: int, where: str) -> TensorEntry:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is damaged: tensor {name[:200]!r} has no description.")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{where}: tensor {name[:200]!r} has dtype {str(dtype)[:50]!r}, which is unknown here.")
    if not isinstance(shape, list) or len(shape) > 16 or not all(map(_is_size, shape)):
        raise ValueError(f"{where} is damaged: tensor {name[:200]!r} has the shape {str(shape)[:100]}.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ValueError(f"{where} is damaged: tensor {name[:200]!r} has the byte range {str(offsets)[:100]}.")
    start, stop = offsets
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if stop - start != needed:
        raise ValueError(
            f"{where} is damaged: tensor {name[:200]!r} of shape {shape} and dtype {dtype} needs {needed} bytes, "
            f"but its byte range {offsets} has {stop - start}."
        )
    return TensorEntry(name, dtype, tuple(shape), data_start + start, data_start + stop)


def _check_cover(entries: Mapping[str, TensorEntry], data_start: int, file_bytes: int, where: str) -> None:
    position = data_start
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != position:
            what = "overlaps another tensor" if entry.start < position else "leaves a hole before it"
            raise ValueError(f"{where} is damaged: the byte range of tensor {entry.name[:200]!r} {what}.")
        position = entry.stop
    if position != file_bytes:
        raise ValueError(
            f"{where} has {file_bytes} bytes, but its header describes {position}; "
            "it is cut off or damaged, so write or download it again."
        )
