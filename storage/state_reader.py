"""Wanted slices of one group out of a staged set: only their bytes, in parallel, verified while they are read."""

from __future__ import annotations

import itertools
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

import torch
from torch import Tensor

from storage.errors import hide_credentials
from storage.shard_reader import PieceRead, ShardReader, Target
from storage.shard_record import DamagedState, ShardRecord, damage
from storage.slices import TensorSlice
from storage.urls import join_url, local_path

LOCAL_BLOCK_BYTES = 2**19  # read and hashed while it is in the processor's cache
REMOTE_BLOCK_BYTES = 16 * 2**20  # fetched at once, in ranges side by side
_JOB_BYTES = 8 * 2**20  # of a thread's piece of work


class StateReader:
    """Fills tensors with slices of one group, shard by shard as their records come in.

    Pieces that a wanted slice holds whole and in order go straight into its tensor; others through one reused buffer a
    thread. Extra memory: at most `buffer_bytes`. Nothing that was read may be used before `finish` has returned.
    `bytes_read` counts bytes of tensors: those wanted, where the wanted slices are made of whole pieces.
    """

    def __init__(
        self,
        folder_url: str | os.PathLike[str],
        group: str,
        wanted: Sequence[tuple[TensorSlice, Tensor]],
        *,
        threads: int = 4,
        buffer_bytes: int = 256 * 2**20,
    ) -> None:
        """Prepare; nothing is read before `feed`.

        Args:
            folder_url: of the set.
            group: the tensors' group.
            wanted: slices, each with the tensor (shape `part.sizes`, any dtype and device) that it goes to.
            threads: that read and verify.
            buffer_bytes: extra memory at most.
        """
        assert all(tuple(out.shape) == part.sizes for part, out in wanted), "a tensor doesn't fit its slice"
        self._folder_url, self._group = folder_url, group
        self._targets: dict[str, list[Target]] = defaultdict(list)
        for part, out in wanted:
            if part.num_elements:
                self._targets[part.name].append(Target(part, out.detach()))
        self._missing = {id(target): target.part.num_elements for target in itertools.chain(*self._targets.values())}
        self._seen: set[tuple[str, tuple[int, ...]]] = set()
        is_local = local_path(folder_url) is not None
        # Of a remote block there are two copies for a moment: the ranges as they came, and the buffer.
        share = buffer_bytes // threads // (1 if is_local else 2)
        self._block_bytes = max(8, min(share, LOCAL_BLOCK_BYTES if is_local else REMOTE_BLOCK_BYTES))
        self._job_bytes = max(_JOB_BYTES, self._block_bytes)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="state-reader")
        self._local = threading.local()
        self._lock = threading.Lock()
        self._jobs: list[Future[None]] = []
        self._failure: Exception | None = None
        self.bytes_read = 0

    def feed(self, record: ShardRecord) -> None:
        """Begin to read what is wanted of a shard that is complete; a record of another group is left alone."""
        if record.group != self._group or self._failure:
            return
        try:
            reads = [read for read in self._reads_of(record) if read.targets]
        except DamagedState as error:
            self._failure = error
            return
        shard = _SharedShard(self._folder_url, record)
        jobs = list(_cut_jobs(reads, self._job_bytes))
        shard.users = len(jobs)
        self._jobs += [self._pool.submit(self._run, shard, job) for job in jobs]

    def _reads_of(self, record: ShardRecord) -> Iterable[PieceRead]:
        for piece in record.pieces:
            place = (piece.part.name, piece.part.starts)
            if piece.part.name not in self._targets or place in self._seen:
                continue
            meta, targets = record.tensors[piece.part.name], []
            for target in self._targets[piece.part.name]:
                if len(target.part.sizes) != len(meta.shape):
                    where = hide_credentials(join_url(self._folder_url, record.file))
                    raise damage(where, f"tensor {piece.part.name!r} has shape {meta.shape}, not that of the model")
                common = piece.part.intersect(target.part)
                if common is not None:
                    targets.append(target)
                    self._missing[id(target)] -= common.num_elements
            self._seen.add(place)
            yield PieceRead(piece, meta, tuple(targets))

    def _run(self, shard: _SharedShard, reads: Sequence[PieceRead]) -> None:
        try:
            if self._failure is None:
                shard.open().read(reads, self._buffer())
                with self._lock:
                    self.bytes_read += sum(read.piece.stop - read.piece.start for read in reads)
        except Exception as error:
            with self._lock:
                self._failure = self._failure or error
        finally:
            shard.leave()

    def _buffer(self) -> Tensor:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = torch.empty(self._block_bytes, dtype=torch.uint8)
        return self._local.buffer

    def is_through(self, timeout_s: float) -> bool:
        """Wait until all that was fed is read; return whether it is, or has failed."""
        return not wait(self._jobs, timeout_s).not_done

    def finish(self) -> None:
        """Wait until all that was fed is read and found intact.

        Raises:
            DamagedState: a shard is damaged, or no shard that was fed holds something that is wanted (a gap).
            OSError: the store can't be reached.
        """
        for job in self._jobs:
            job.result()
        if self._failure is not None:
            raise self._failure
        for target in itertools.chain(*self._targets.values()):
            if self._missing[id(target)]:
                part = target.part
                raise damage(
                    hide_credentials(os.fspath(self._folder_url)),
                    f"there is a gap: of tensor {part.name!r} of {self._group}, {self._missing[id(target)]} elements "
                    f"from {part.starts} of sizes {part.sizes} are in none of its shards",
                )

    def close(self, *, may_hang: bool = False) -> None:
        """Stop reading and free what is open; the tensors that were to be filled are not touched afterwards.

        Args:
            may_hang: leave reads under way to themselves, as of a store that hangs; they may still touch tensors.
        """
        with self._lock:  # an error goes for good: its frames hold this reader, and so all that was to be filled
            self._failure = DamagedState("the reader was closed.")
        self._pool.shutdown(wait=not may_hang, cancel_futures=False)  # what hasn't begun ends at once

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class _SharedShard:
    """A shard that is opened by the first of its users and closed by the last."""

    def __init__(self, folder_url: str | os.PathLike[str], record: ShardRecord) -> None:
        self._folder_url, self._record = folder_url, record
        self._lock = threading.Lock()
        self._reader: ShardReader | None = None
        self.users = 0

    def open(self) -> ShardReader:
        with self._lock:
            if self._reader is None:
                self._reader = ShardReader(self._folder_url, self._record)
            return self._reader

    def leave(self) -> None:
        with self._lock:
            self.users -= 1
            if self.users == 0 and self._reader is not None:
                self._reader.close()


def _cut_jobs(reads: Sequence[PieceRead], job_bytes: int) -> Iterable[list[PieceRead]]:
    """Yield runs of reads of about `job_bytes` each; a piece is never cut, since it is hashed front to back."""
    job: list[PieceRead] = []
    held = 0
    for read in reads:
        length = read.piece.stop - read.piece.start
        if job and held + length > job_bytes:
            yield job
            job, held = [], 0
        job.append(read)
        held += length
    if job:
        yield job
