"""What staged state is measured against, two processes each: torch.distributed.checkpoint, and plain s3fs.

`Peers` starts the processes and gives them orders; `python -m tests.benchmarks.staged_peers KIND RANK SPEC.json` is one
of them. Orders and answers are lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nereus.runtime.worker import peak_rss_bytes, reset_peak_rss, rss_bytes

RANKS = 2
# Parts of objects that are fetched side by side; the fastest way that s3fs has.
RANGE_BYTES = 16 * 2**20


class Peers:
    """Two processes that save and load the same bytes in another way."""

    def __init__(self, kind: str, spec: Mapping[str, Any], folder: Path, env: Mapping[str, str] | None = None) -> None:
        """Start them; they are ready when they have answered the first order.

        Args:
            kind: "dcp", "s3fs" or "moves".
            spec: what they hold, see the classes below.
            folder: for files of ours.
            env: more environment, such as that of a store.
        """
        path = folder / f"{kind}.json"
        path.write_text(json.dumps(dict(spec)))
        command = [sys.executable, "-m", "tests.benchmarks.staged_peers", kind]
        environment = {**os.environ, **(env or {}), "OMP_NUM_THREADS": "1"}
        self._processes = [
            subprocess.Popen(
                [*command, str(rank), str(path)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        self.order("wait")

    def order(self, method: str, **arguments: Any) -> tuple[float, list[int]]:
        """Have all call a method; return the seconds until the last is done, and the extra memory of each in bytes."""
        begun = time.perf_counter()
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([method, arguments]) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        seconds = time.perf_counter() - begun
        assert all(answers), f"a peer failed to {method}"
        return seconds, [json.loads(answer) for answer in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


class CheckpointPeer:
    """One rank of torch.distributed.checkpoint, with its defaults: saves tp2 shards as DTensors, loads those of pp2.

    Spec: `tensors` {name: [shape, dimension that tp splits, or null]}, `stages` [names that each pp stage holds],
    `store` a file where the ranks meet.
    """

    def __init__(self, rank: int, spec: Mapping[str, Any]) -> None:
        import torch
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard

        from tests.benchmarks.staged_service import whole_tensor

        distributed.init_process_group("gloo", init_method=f"file://{spec['store']}", rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", (RANKS,))
        self._spec, self._saved, self._loaded = spec, {}, {}
        for name, (shape, dim) in spec["tensors"].items():
            whole = whole_tensor(name, tuple(shape))
            local = whole if dim is None else whole.chunk(RANKS, dim)[rank].contiguous().clone()
            placement = Replicate() if dim is None else Shard(dim)
            self._saved[name] = DTensor.from_local(
                local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        for name in spec["stages"][rank]:
            self._loaded[name] = torch.empty(spec["tensors"][name][0])

    def wait(self) -> None:
        """Be ready."""

    def save(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.save(self._saved, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(self._loaded, checkpoint_id=folder)

    def spoil(self) -> None:
        for tensor in self._loaded.values():
            tensor.fill_(0)

    def check(self) -> None:
        """Raise if something that was loaded is not what was saved."""
        from tests.benchmarks.staged_service import whole_tensor

        for name, tensor in self._loaded.items():
            assert tensor.equal(whole_tensor(name, tuple(tensor.shape))), name


class S3Peer:
    """One process that puts and gets objects with s3fs alone, several at the same time.

    Spec: `sizes` [bytes of the objects of each process], `streams` objects at the same time.
    """

    def __init__(self, rank: int, spec: Mapping[str, Any]) -> None:
        import s3fs

        self._rank, self._sizes, self._streams = rank, spec["sizes"][rank], spec["streams"]
        self._files = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL_S3"], use_listings_cache=False)
        self._bytes = os.urandom(max(self._sizes))

    def wait(self) -> None:
        """Be ready."""

    def save(self, folder: str) -> None:
        view = memoryview(self._bytes)
        self._files.pipe(
            {self._name(folder, index): bytes(view[:size]) for index, size in enumerate(self._sizes)},
            batch_size=self._streams,
        )

    def load(self, folder: str) -> None:
        ranges = [
            (self._name(folder, index), start, min(start + RANGE_BYTES, size))
            for index, size in enumerate(self._sizes)
            for start in range(0, size, RANGE_BYTES)
        ]
        # A few objects at a time: what was fetched is let go, as a reader that has copied it does.
        for first in range(0, len(ranges), 2 * self._streams):
            paths, starts, ends = zip(*ranges[first : first + 2 * self._streams], strict=True)
            parts = self._files.cat_ranges(list(paths), list(starts), list(ends), batch_size=self._streams)
            assert [len(part) for part in parts] == [stop - start for start, stop in zip(starts, ends, strict=True)]

    def _name(self, folder: str, index: int) -> str:
        return f"{folder}/{self._rank}-{index:04d}"


def main(kind: str, rank: str, spec_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    from tests.benchmarks.transition_peers import MovingPeer

    peer = {"dcp": CheckpointPeer, "s3fs": S3Peer, "moves": MovingPeer}[kind](int(rank), spec)
    for line in sys.stdin:
        method, arguments = json.loads(line)
        reset_peak_rss()
        held = rss_bytes()
        getattr(peer, method)(**arguments)
        print(peak_rss_bytes() - held, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
