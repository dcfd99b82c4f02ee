"""A short text that changes when a checkpoint's weights or its meaning change."""

from __future__ import annotations

import json
import posixpath

import xxhash

from nereus.model.checkpoint import checkpoint_files, read_config
from storage.byte_reader import ByteReader, open_bytes
from storage.safetensors_file import SafetensorsFile

FULL_BYTES = 2 * 2**30  # up to this size all of a local checkpoint is hashed: about a second from disk
_BLOCK_BYTES = 8 * 2**20
_SAMPLES = 64  # of a file that is sampled
_SAMPLE_BYTES = 64 * 2**10
_VOLATILE_KEYS = ("_name_or_path", "transformers_version", "use_cache")  # of config.json; say nothing of the model


def fingerprint(path: str) -> str:
    """Return `xxh3_128:full:HEX` or `xxh3_128:sampled:HEX` of a checkpoint folder, in about a second.

    Both cover config.json (without keys that don't matter to the model), file names, sizes and headers. "full" adds
    every byte; it is used for local checkpoints of at most FULL_BYTES. "sampled" adds _SAMPLES blocks of 64 KiB spread
    evenly over each file, which sees any training step but not a change of a few numbers.

    Raises:
        ValueError: as `read_config` and `checkpoint_files`.
    """
    config = {key: value for key, value in read_config(path).items() if key not in _VOLATILE_KEYS}
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    urls = checkpoint_files(path)
    readers = [open_bytes(url) for url in urls]
    try:
        is_full = all(reader.is_local for reader in readers) and sum(r.size for r in readers) <= FULL_BYTES
        for url, reader in zip(urls, readers, strict=True):
            with SafetensorsFile(url) as file:
                header = file.header
            digest.update(json.dumps([posixpath.basename(url), header.file_bytes, header.checksum]).encode())
            _add_content(digest, reader, is_full=is_full)
    finally:
        for reader in readers:
            reader.close()
    return f"xxh3_128:{'full' if is_full else 'sampled'}:{digest.hexdigest()}"


def _add_content(digest: xxhash.xxh3_128, reader: ByteReader, *, is_full: bool) -> None:
    size = _BLOCK_BYTES if is_full else _SAMPLE_BYTES
    if is_full or reader.size <= _SAMPLES * size:
        starts = list(range(0, reader.size, size))
    else:
        starts = [(reader.size - size) * sample // (_SAMPLES - 1) for sample in range(_SAMPLES)]
    buffer = bytearray(size)
    for start in starts:
        view = memoryview(buffer)[: min(size, reader.size - start)]
        reader.read_into(start, view)
        digest.update(view)
