"""Services that the workers of the runtime's tests run."""

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from nereus.runtime.communicator import Communicator
from nereus.runtime.worker import WorkerContext


class PlainService:
    """Commands that need no peers."""

    PRELOADED = ("colorsys",)

    def __init__(self, context: WorkerContext) -> None:
        self.was_loaded = "colorsys" in sys.modules
        self.context = context
        self.kept: list[torch.Tensor] = []

    def describe(self) -> dict[str, Any]:
        """Return what the worker was made with."""
        return {
            "device": self.context.device,
            "torch_device": str(self.context.torch_device),
            "threads": torch.get_num_threads(),
            "cores": os.sched_getaffinity(0),
            "huge_pages": os.environ["THP_MEM_ALLOC_ENABLE"],
            "preloaded": self.was_loaded,
        }

    def echo(self, value: Any) -> Any:
        """Return the argument."""
        return value

    def nap(self, seconds: float) -> int:
        """Sleep."""
        time.sleep(seconds)
        return self.context.device

    def write(self, text: str) -> None:
        """Write to both standard streams."""
        print(text, flush=True)
        print(text, file=sys.stderr)

    def fail(self, message: str) -> None:
        """Raise an error with a cause."""
        raise ValueError(message) from KeyError("the cause")

    def end(self, code: int) -> None:
        """End the process in mid-command."""
        os._exit(code)

    def start_a_thread_without_memory(self) -> None:
        """Start a thread whose first allocation is refused, so that it never says that it has begun."""
        threading._start_new_thread = lambda *_: None  # type: ignore[attr-defined]
        threading.Thread(target=print).start()

    def unpicklable(self) -> Any:
        """Return what no message can carry."""
        return lambda: None

    def allocate(self, num_bytes: int) -> int:
        """Touch and keep a tensor; return the peak memory."""
        self.kept.append(torch.ones(num_bytes, dtype=torch.uint8))
        return self.context.peak_memory_bytes()

    def measure(self, num_bytes: int) -> tuple[int, int, int]:
        """Return the peak at first, with a tensor and as much shared memory, and after both are gone and a reset."""
        ballast = torch.ones(
            32 << 20, dtype=torch.uint8
        )  # the heap may have shrunk below the baseline, which counts as 0
        self.context.reset_peak_memory()
        before = self.context.peak_memory_bytes()
        tensor = torch.ones(num_bytes, dtype=torch.uint8)
        shared = mmap.mmap(-1, num_bytes)
        for start in range(0, num_bytes, mmap.PAGESIZE):
            shared[start] = 1
        during = self.context.peak_memory_bytes()
        del tensor
        shared.close()
        self.context.reset_peak_memory()
        after = self.context.peak_memory_bytes()
        assert ballast[0] == 1  # held until here
        return before, during, after


class FailingService:
    """A service that can't be made."""

    def __init__(self, context: WorkerContext) -> None:
        raise ValueError(f"no service on device {context.device}")


class GroupService:
    """Commands of one group of workers; `connect` first."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.communicator: Communicator | None = None
        self.value: Any = None

    def keep(self, value: Any) -> None:
        """Keep a value."""
        self.value = value

    def kept(self) -> Any:
        """Return the value."""
        return self.value

    def nap(self, seconds: float) -> int:
        """Sleep, whatever happens."""
        time.sleep(seconds)
        return self.context.device

    def connect(self, devices: list[int], epoch: int, same_host: bool) -> tuple[int, int]:
        """Make the group's communicator, in place of the last one."""
        if self.communicator is not None:
            self.communicator.close()
        self.communicator = Communicator.connect(
            store_address=self.context.store_address,
            name="test",
            epoch=epoch,
            rank=devices.index(self.context.device),
            size=len(devices),
            torch_device=self.context.torch_device,
            abort=self.context.abort,
            same_host=same_host,
        )
        return self.communicator.rank, self.communicator.size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce in place and return the tensor."""
        self._group.all_reduce(tensor, op)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gather over the group."""
        return self._group.all_gather(tensor)

    def broadcast(self, tensor: torch.Tensor, src: int) -> torch.Tensor:
        """Broadcast in place and return the tensor."""
        self._group.broadcast(tensor, src)
        return tensor

    def mixed(self, seed: int, rounds: int) -> list[torch.Tensor]:
        """Run a random series of collectives, the same on all ranks, with sizes around all limits."""
        draw = torch.Generator().manual_seed(seed)
        own = torch.Generator().manual_seed(1000 * seed + self._group.rank)
        results: list[torch.Tensor] = []
        for _ in range(rounds):
            kind = int(torch.randint(4, (1,), generator=draw))
            count = int(2 ** (20 * torch.rand(1, generator=draw)))
            tensor = torch.rand(count + (self._group.rank if kind == 1 else 0), generator=own)
            if kind == 0:
                self._group.all_reduce(tensor)
            elif kind == 1:
                tensor = torch.cat(self._group.all_gather(tensor))
            elif kind == 2:
                self._group.broadcast(tensor, src=count % self._group.size)
            else:
                self._group.barrier()
                continue
            results.append(tensor.double().sum())
        return results

    def exchange(self, counts: list[int]) -> list[torch.Tensor]:
        """Send to every peer one tensor a count, tags counting down; receive by tags counting up, waits reversed."""
        group = self._group
        peers = [peer for peer in range(group.size) if peer != group.rank]
        sends = []
        for tag, count in reversed(list(enumerate(counts))):
            sends += [group.send(torch.full((count,), 100.0 * group.rank + tag), peer, tag) for peer in peers]
        received = [torch.empty(count) for _ in peers for count in counts]
        receives = [
            group.recv(tensor, peer, tag)
            for tensor, (peer, tag) in zip(
                received, ((peer, tag) for peer in peers for tag in range(len(counts))), strict=True
            )
        ]
        for pending in reversed(receives):
            pending.wait()
        for pending in sends:
            pending.wait()
        return received

    def ring(self, rounds: int) -> torch.Tensor:
        """Pass a number around, many times over one tag: order is kept and letters are used again."""
        group = self._group
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        total = torch.zeros(3)
        for number in range(rounds):
            sent = group.send(torch.full((3,), float(number * (group.rank + 1))), right)
            received = torch.empty(3)
            group.recv(received, left).wait()
            sent.wait()
            assert float(received[0]) == number * (left + 1)
            total += received
        return total

    def send_and_trim(self, num_bytes: int) -> tuple[int, int, bool]:
        """Exchange one message with rank 1 - rank; return the shared bytes before and after the trim, and whether a
        message that comes after it is right."""
        group = self._group
        peer = 1 - group.rank
        received = torch.zeros(num_bytes, dtype=torch.uint8)
        held = []
        for value in (1, 2):
            pending = group.send(torch.full((num_bytes,), value, dtype=torch.uint8), peer)
            group.recv(received, peer).wait()
            pending.wait()
            group.barrier()
            held.append(_shared_bytes())
            group.barrier()  # the peer's trim takes the pages that are mapped here too
            group.trim()
            group.barrier()
            held.append(_shared_bytes())
        return held[0], held[1], bool((received == 2).all())

    def sum_and_release(self, counts: list[int]) -> list[tuple[int, int, bool]]:
        """Sum so many float32 for each count; return the shared bytes that came with it and those that stayed after the
        slots were released, and whether the sum was right."""
        group = self._group
        result = []
        for count in counts:
            group.release_slots()
            group.barrier()
            before = _shared_bytes()
            for _ in range(2):  # both buffers
                flat = torch.full((count,), 1.0 + group.rank)
                group.all_reduce(flat)
            group.barrier()
            held = _shared_bytes()
            group.release_slots()
            group.barrier()
            is_right = bool((flat == group.size * (group.size + 1) / 2).all())
            result.append((held - before, _shared_bytes() - before, is_right))
            group.barrier()
        return result

    def block(self, way: str) -> None:
        """Wait for a peer that never comes."""
        if way == "recv":
            self._group.recv(torch.empty(4), (self._group.rank + 1) % self._group.size).wait()
        else:
            self._group.all_reduce(torch.ones(4))

    def all_reduce_until_stopped(self, seconds: float) -> None:
        """Reduce for a long time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._group.all_reduce(torch.ones(1000))

    def disagree(self) -> None:
        """Call the same collective with a size of its own on each rank."""
        self._group.all_reduce(torch.ones(10 + self._group.rank))

    def time_all_reduce(self, num_elements: int, repeats: int) -> float:
        """Return the seconds of one all-reduce, the median of many."""
        return self._time(lambda: self._group.all_reduce(tensor), repeats, tensor := torch.ones(num_elements))

    def time_ping_pong(self, num_elements: int, repeats: int) -> float:
        """Return the seconds of one message from rank 0 to rank 1 and back, the median of many."""
        tensor = torch.ones(num_elements)
        peer = 1 - self._group.rank

        def bounce() -> None:
            if self._group.rank == 0:
                self._group.send(tensor, peer).wait()
                self._group.recv(tensor, peer).wait()
            else:
                self._group.recv(tensor, peer).wait()
                self._group.send(tensor, peer).wait()

        return self._time(bounce, repeats, tensor)

    def _time(self, action: Any, repeats: int, tensor: torch.Tensor) -> float:
        for _ in range(3):
            action()
        seconds = []
        for _ in range(repeats):
            tensor.fill_(1)
            self._group.barrier()
            started = time.perf_counter()
            action()
            seconds.append(time.perf_counter() - started)
        return sorted(seconds)[len(seconds) // 2]

    @property
    def _group(self) -> Communicator:
        assert self.communicator is not None
        return self.communicator


def _shared_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem")
